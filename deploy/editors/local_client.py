"""Makes the package `tercet-client` from the modules in `gateway/static`, for builds of the plug-ins.

It knows no plug-in.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

STATIC = Path(__file__).parents[2] / "gateway/static"
MODULES = {".": "tercet", "./codemirror": "codemirror"}


def make_client(folder: Path, tsc: Path) -> Path:
    """Write the package with its declarations to `folder`, replacing it; returns the folder.

    Args:
        tsc: TypeScript's compiler.

    Raises:
        subprocess.CalledProcessError: the modules' JSDoc types have errors.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    modules = {path: name for path, name in MODULES.items() if (STATIC / f"{name}.js").exists()}
    for path in STATIC.glob("*.js"):
        # A bundle in CommonJS has no `import.meta`, and a plug-in always names its server.
        (folder / path.name).write_text(path.read_text().replace("import.meta.url", '"http://localhost:8000/static/"'))
    exports = {path: {"types": f"./{name}.d.ts", "default": f"./{name}.js"} for path, name in modules.items()}
    (folder / "package.json").write_text(
        json.dumps({"name": "tercet-client", "version": "0.0.0", "type": "module", "exports": exports})
    )
    config = {
        "compilerOptions": {
            "allowJs": True, "declaration": True, "emitDeclarationOnly": True, "strict": True, "target": "ES2022",
            "lib": ["ES2022", "DOM", "DOM.Iterable"], "module": "ESNext", "moduleResolution": "bundler", "types": [],
        },
        "files": [f"{name}.js" for name in modules.values()],
    }  # fmt: skip
    (folder / "tsconfig.json").write_text(json.dumps(config))
    subprocess.run([tsc], cwd=folder, check=True)
    return folder
