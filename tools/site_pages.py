"""A hook of MkDocs: the site's pages that are not in docs/, and links that lead to them.

- README.md is the first page. Pages of other folders are read where they are, not copied.
- Each group of public names has a page of reference, made of their docstrings.
- A link to any other file of the repository leads to a page that shows the file. So does one to a
  folder without a README.md, whose page has its files.
"""

import ast
import functools
import json
import os
import posixpath
import re
from pathlib import Path

import research_dp

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = "docs/notebook/first_hour.ipynb"
# Group of public names -> the modules below research_dp that define them, or single names.
GROUPS = {
    "Commands": ("commands", "UsageError"),
    "Strategies": ("strategies", "distributed.mesh"),
    "Models": ("models", "TrainableModel", "LossOutput"),
    "Data": ("data", "training.batches", "DataSet", "TrainOrder", "EvalOrder"),
    "Collectives": (
        *("distributed.collectives", "distributed.buckets", "distributed.gradient_sync"),
        *("distributed.differentiable_gather", "distributed.batch_examples"),
    ),
    "Sharding": ("distributed.fsdp", "distributed.sharding"),
    "Optimizers": (
        *("distributed.optimizer", "distributed.sharded_optimizer", "distributed.update"),
        *("distributed.norms", "distributed.microbatch"),
        "distributed.matrices",
    ),
    "Compat": ("compat",),
}
CODE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"""(\]\(|\b(?:src|srcset|href)=")([^)\s"#]+)""")
LANGUAGES = {".py": "python", ".gin": "python", ".yaml": "yaml", ".toml": "toml", ".sbatch": "bash"}


def outside_pages() -> dict[str, str]:
    """Returns the place on the site of each page that is outside docs/, or no Markdown."""
    places = {"README.md": "index.md", NOTEBOOK: "notebook.md"}
    places |= {f"{name}.md": f"{name.lower()}.md" for name in ("CHANGELOG", "CONTRIBUTING")}
    places["ROADMAP.md"] = "roadmap.md"
    for path in sorted((ROOT / "experiments").rglob("*.md")):
        folder = path.parent.name if path.parent.name != "experiments" else "index"
        name = folder + path.stem.removeprefix("README")
        places[path.relative_to(ROOT).as_posix()] = f"results/{name}.md"
    return places


def reference_pages() -> dict[str, str]:
    """Returns a page for each group of public names."""
    pages = {}
    for group in GROUPS:
        names = [name for name in sorted(research_dp.__all__) if group_of(name) == group]
        entries = [f"::: research_dp.{name}\n" for name in names]
        pages[f"reference/{group.lower()}.md"] = "\n".join([f"# {group}\n", *entries])
    return pages


@functools.cache
def modules() -> dict[str, str]:
    """Returns the module of each public name, below research_dp."""
    stub = ast.parse(Path(research_dp.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def group_of(name: str) -> str:
    """Returns the group of a public name; of several, the one that has the name itself."""
    module = modules()[name]
    found = {group for group, parts in GROUPS.items() if name in parts} or {
        group
        for group, parts in GROUPS.items()
        if any(f"{module}.".startswith(f"{part}.") for part in parts)
    }
    if len(found) != 1:
        raise ValueError(f"{name} of {module} is in {len(found)} groups of {__file__}; give it one")
    return found.pop()


def notebook_page() -> str:
    """Returns the notebook's cells as Markdown, with what they printed and drew."""
    parts = []
    for cell in json.loads((ROOT / NOTEBOOK).read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", ())})
            if picture := data.get("image/png"):
                parts.append(f"![What the cell draws](data:image/png;base64,{picture.strip()})")
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts)


def source_page(path: Path) -> str:
    """Returns a page that shows a file of the repository, or those of a folder."""
    wide = "---\nhide: [navigation, toc]\n---\n\n"
    shown = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in LANGUAGES)
    parts = [f"# {path.relative_to(ROOT).as_posix()}\n"]
    for file in shown:
        parts += [f"## {file.name}\n"] if file != path else []
        parts.append(f"````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}````\n")
    return wide + "\n".join(parts)


def links(markdown: str, folder: str) -> dict[str, str]:
    """Returns the relative links of a page in a folder of the repository: link -> path."""
    found = [link for _, link in LINK.findall(CODE.sub("", markdown)) if ":" not in link]
    return {link: posixpath.normpath(posixpath.join(folder, link)) for link in found}


def on_files(files, config):
    """Adds the pages that are not in docs/."""
    from mkdocs.structure.files import File  # here: the reference is listed without mkdocs

    places = outside_pages()
    texts = {
        place: notebook_page() if path == NOTEBOOK else (ROOT / path).read_text()
        for path, place in places.items()
    }
    texts |= reference_pages()
    paths = {f"docs/{file.src_uri}": file.src_uri for file in files.documentation_pages()}
    paths |= places
    for path, place in list(paths.items()):
        text = texts[place] if place in texts else (ROOT / path).read_text()
        for target in links(text, posixpath.dirname(path)).values():
            source = ROOT / target
            has_page = target in paths or f"{target}/README.md" in paths
            if not has_page and not target.startswith("docs/") and source.exists():
                paths[target] = f"source/{target}.md"
                texts[paths[target]] = source_page(source)
    for place, text in texts.items():
        files.append(File.generated(config, place, content=text))
    config["extra"]["places"] = paths
    return files


def on_page_markdown(markdown, page, config, files):
    """Turns links into those of the site; links to a folder lead to its README.md."""
    places = config["extra"]["places"]
    paths = {place: path for path, place in places.items()}
    if page.file.src_uri not in paths:  # a page of reference
        return markdown
    place = posixpath.dirname(page.file.src_uri)

    def moved(match: re.Match) -> str:
        before, link = match.groups()
        path = links(match[0], posixpath.dirname(paths[page.file.src_uri])).get(link, link)
        target = places.get(path) or places.get(f"{path}/README.md")
        if not target and path.startswith("docs/"):
            target = path.removeprefix("docs/")
        return before + (os.path.relpath(target, place or ".") if target else link)

    parts, end = [], 0
    for block in [*CODE.finditer(markdown), None]:
        start = block.start() if block else len(markdown)
        parts.append(LINK.sub(moved, markdown[end:start]))
        if block:
            parts.append(block[0])
            end = block.end()
    return "".join(parts)
