"""The notebook runs in a real kernel, and shows what a reader should see."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason='pip install ".[dev]"')
nbclient = pytest.importorskip("nbclient", reason='pip install ".[dev]"')
pytest.importorskip("ipykernel", reason='pip install ".[dev]"')

NOTEBOOK = Path(__file__).parents[1] / "examples" / "first_run.ipynb"


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The outputs of each cell of code, by its last line."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
    nbclient.NotebookClient(notebook, timeout=200, resources=place).execute()
    return {
        cell.source.splitlines()[-1]: cell.outputs
        for cell in notebook.cells
        if cell.cell_type == "code"
    }


def test_it_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None


def test_federation_comparison_and_result_show_themselves_as_tables(shown):
    for name, word in (("fed", "20"), ("found", "standalone"), ("pace", "handed")):
        [page] = [o.data["text/html"] for o in shown[name] if o.output_type == "execute_result"]
        assert "<table" in page and word in page


def test_one_display_has_the_bars_of_all_runs(shown):
    bars, table = shown["found"]
    assert bars.output_type == "display_data" and table.output_type == "execute_result"
    lines = bars.data["text/plain"].splitlines()
    assert [line.split()[0] for line in lines] == ["pace", "fedavg", "standalone"]
    assert all("200/200" in line and "accuracy" in line for line in lines)


def test_plots_are_inline(shown):
    [plot] = shown["plt.show()"]
    assert "image/png" in plot.data


def test_the_exported_model_is_the_one_that_was_measured(shown):
    [output] = shown['right.float().mean().item(), pace.clients[3]["accuracy"]']
    plain, measured = eval(output.data["text/plain"])
    assert plain == pytest.approx(measured)
