"""The benchmark of scaling: its figures by hand."""

from types import SimpleNamespace

from bench.studies import scaling


def test_figures_by_hand():
    rows = [
        scaling.Row("strong", 1, 1000, wall=[2.0, 9.0, 1.0], cpu=[2.0, 2.0, 2.0]),
        scaling.Row("strong", 4, 1000, wall=[1.0], cpu=[2.5]),
        scaling.Row("weak", 2, 2000, wall=[1.0], cpu=[3.0]),
    ]
    arguments = SimpleNamespace(recipe="quickstart", split="data", precision="fp32", visits=1)
    text = scaling.markdown(rows, arguments, {"cores": 2})
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert cells[1] == ["strong", "1", "1,000", "2 s", "500", "500", "100.0%", "2,000.0", "100.0%"]
    assert cells[2] == ["strong", "4*", "1,000", "1 s", "1,000", "250", "50.0%", "2,500.0", "80.0%"]
    assert cells[3] == ["weak", "2", "2,000", "1 s", "2,000", "1,000", "100.0%", "1,500.0", "100.0%"]
    assert "2 cores" in text
    assert "cores" not in scaling.markdown(rows[2:], arguments, {"cores": 2}).split("Machine:")[0]
