"""The default learning rates hold against the grids that were measured, and the page shows them."""

import defaults

from steppe.optim import optimizer_names, optimizer_spec


def test_every_default_is_within_two_points_of_the_best_of_its_grid():
    found = defaults.stored()
    assert list(found) == list(defaults.STUDIES)
    for name, study in defaults.STUDIES.items():
        if study.radius:
            continue
        rows = found[name]
        assert tuple(rows) == (study.optimizers or optimizer_names())
        for optimizer, row in rows.items():
            pretrained = bool(study.backbone)
            default = optimizer_spec(optimizer).defaults(pretrained=pretrained)["lr"]
            expected = [float(f"{default * factor:.4g}") for factor in defaults.FACTORS]
            assert list(map(float, row)) == expected, (name, optimizer)
            assert all(len(values) == defaults.SEEDS for values in row.values())
            _, lead, noise = defaults.verdict(row)
            assert lead <= max(2.0, noise), (name, optimizer)


def test_the_page_has_the_tables_of_what_is_stored():
    page = defaults.PAGE.read_text()
    for name, found in defaults.stored().items():
        assert defaults.write_tables(page, {name: "gone"}) != page
        assert defaults.write_tables(page, {name: defaults.table(found)}) == page
