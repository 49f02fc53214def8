"""Makes the comment beside a class's field its description on the site, as a reader sees it."""

import re

import griffe


class FieldComments(griffe.Extension):
    """Fills in the docstring of attributes that have none."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_) -> None:
        """Reads the comment at the end of the attribute's line, or those above it."""
        if attr.docstring or not attr.parent or not attr.parent.is_class or not attr.lineno:
            return
        lines = attr.parent.module.source.splitlines()
        text = lines[attr.lineno - 1].partition("  # ")[2]
        above = attr.lineno - 2
        while not text.strip() or above < attr.lineno - 2:
            comment = re.fullmatch(r" *# (.*)", lines[above])
            if not comment:
                break
            text, above = f"{comment[1]} {text}", above - 1
        if text.strip():
            attr.docstring = griffe.Docstring(text.strip(), parent=attr)
