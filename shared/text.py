"""Which characters are no text: nobody types them. A model writes them where its bytes do not make up characters."""

from __future__ import annotations

import re

# Control characters but tab and line ends, the specials (such as U+FFFD) and the noncharacters. Not the format
# characters that writers need: joiners of emoji and Persian, variation selectors, marks of direction, soft hyphens.
_PLANE_ENDS = "".join(f"{chr(end - 1)}{chr(end)}" for end in range(0x1FFFF, 0x110000, 0x10000))
NOT_TEXT = re.compile(f"[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufdd0-\ufdef\ufff0-\uffff{_PLANE_ENDS}]")
