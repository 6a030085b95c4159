"""Tables that scripts write into pages of the docs, between comments that name the script."""


def fill(page: str, tables: dict[str, str], script: str) -> str:
    """The page, with tables in the places it has for them."""
    for name, text in tables.items():
        begin, end = f"<!-- {name}: made by docs/{script} -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        if rest:
            page = f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"
    return page
