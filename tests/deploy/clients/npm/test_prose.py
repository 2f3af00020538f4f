"""Where a text is prose: the package's `isProse`, in Node, on texts that end at the caret."""

from __future__ import annotations

import json

from tests.npm_package import NpmPackage

CODE = {
    "fences": ["```\nx", "~~~ js\nx", "```js", "````\n```\nx", "~~~\n```\nx", "```\n\nx", "~~~~\n~~~\nx", "```a\nb`c"],
    "fences in lists and quotes": ["- ```\n  x", "1. a\n\n   ```py\n   x", "* a\n  * b\n    ~~~\n    x", "> ```\n> x"],
    "inline code": ["``", "`x", "a `b c", "``a ` b", "a `b\nc"],
    "front matter": ["---", "---\na: b", "+++\na = 1", "---\r\na: b\r\nc", "\ufeff---\nx", "---\na: b\n\nc"],
    "blocks after others": ["---\na: b\n---\n```\nx", "a\n```\nx\n```\n\n```\ny", "- a\n```\nx"],
    "mathematics": ["$$\nx", "$$x", "\\[ x", "\\(x", "$x + ", "a $x$ and $y", "$$\na\n\nb", "\\[\na\n\n", "a $x\\$ y"],
}
PROSE = {
    "plain": ["", "a", "# a", "- a", "a\n---\nb", "a\n+++\nb"],
    "after fences": ["```\nx\n```\ny", "~~~\nx\n~~~\ny", "```\r\nx\r\n```\r\ny", "1. x\n\n   ```\n   y\n   ```\n   z"],
    "after quoted fences": ["> ```\n> x\n\ny", "> ```\n> x\ny", "> ```\n> x\n> ```\n> y"],
    "inline code": ["`x` y", "```x``` y", "``a ` b`` c", "`\\` y", "\\`x", "- a `b\n- c", "a `b\n\nc", "a `b\n# c"],
    "front matter": ["---\na: b\n---\ny", "+++\na\n+++\ny", "---\na: b\n...\ny", "---\r\na\r\n---\r\ny", "---\n\ny"],
    "money": ["a $5 b", "a $ b", "costs $5 and $6", "\\$x", "$HOME is\nb"],
    "mathematics": ["$x$ b", "$$x$$ y", "$$\nx\n$$\ny", "$$\nx\n$$ {#eq:1}\n\ny", "\\(x\\) y", "\\[x\\] y", "\\\\(x"],
}
PROGRAM = """
import { isProse, ProseDetector } from "tercet-client";
const answers = TEXTS.map((text) => {
  const detector = new ProseDetector();
  let grown = "";
  for (const character of text) {
    const now = (grown += character);
    const isSame = detector.isProse(now.length, (from, to) => now.slice(from, to)) === isProse(now);
    if (!isSame) throw new Error(JSON.stringify(now));
  }
  return isProse(text);
});
const novel = `\\`\\`\\`\\n${"The old man looked at the “sea”.\\n".repeat(32000)}`;
const detector = new ProseDetector();
let numRead = 0;
const slice = (from, to) => {
  numRead += to - from;
  return novel.slice(from, to);
};
answers.push(detector.isProse(novel.length, slice));
numRead = 0;
answers.push(detector.isProse(novel.length, slice));
console.log(JSON.stringify([answers, numRead]));
"""


def test_code_front_matter_and_mathematics_are_no_prose(npm_package: NpmPackage) -> None:
    """The 1,000,000 characters are read once, not at each key."""
    code, prose = ([text for texts in group.values() for text in texts] for group in (CODE, PROSE))
    program = PROGRAM.replace("TEXTS", json.dumps(code + prose))
    answers, num_read = json.loads(npm_package.run("node", "--input-type=module", "--eval", program))
    is_prose = dict(zip([*code, *prose, "novel", "novel, again"], answers, strict=True))
    assert [text for text in [*code, "novel", "novel, again"] if is_prose[text]] == []
    assert [text for text in prose if not is_prose[text]] == []
    assert num_read < 1000
