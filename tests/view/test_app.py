"""The endpoints: they read, and only what they are meant to."""

import json

import numpy as np
import pytest
from starlette.testclient import TestClient

from polytempo.core.errors import PolytempoError
from polytempo.view.app import make_app
from polytempo.view.save import save
from polytempo.view.serve import bind, is_local

HERE = "http://127.0.0.1:7600"


def client_of(folder, token=None, where=HERE):
    return TestClient(make_app([folder], token), base_url=where, follow_redirects=False)


@pytest.fixture
def runs(make_run, log, tmp_path):
    make_run("one", [log("dispatch", 0.0, client=1, dispatch=0)])
    (tmp_path / "secret.txt").write_text("secret")
    return tmp_path / "runs"


def test_the_page_and_all_that_it_loads_are_served_from_here(runs):
    client = client_of(runs)
    page = client.get("/")
    assert page.status_code == 200 and "https://" not in page.text
    for path, kind in (
        ("/page/view.js", "javascript"),
        ("/page/view.css", "css"),
        ("/page/icon.svg", "svg"),
        ("/plotly.js", "javascript"),
    ):
        assert path in page.text
        answer = client.get(path)
        assert answer.status_code == 200 and kind in answer.headers["content-type"]
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_runs_and_one_run(runs):
    client = client_of(runs)
    (listed,) = client.get("/api/runs").json()["runs"]
    assert listed["name"] == "one"
    found = client.get(f"/api/runs/{listed['key']}").json()
    assert found["clients"]["counts"] == [3, 1, 0, 0]
    same = client.get(f"/api/runs/{listed['key']}", params={"have": found["have"]})
    assert same.status_code == 204
    other = client.get(f"/api/runs/{listed['key']}?order=number&have={found['have']}")
    assert other.status_code == 200
    with (runs / "one" / "events.jsonl").open("a") as file:
        file.write(
            '{"n": 1, "time": 1, "event": "leave", "client": 0, "updates": 0, "version": 0}\n'
        )
    fresh = client.get(f"/api/runs/{listed['key']}", params={"have": found["have"]})
    assert fresh.json()["clients"]["counts"] == [2, 1, 0, 1]


@pytest.mark.parametrize(
    "path",
    [
        *("/api/runs/..", "/api/runs/../secret.txt", "/api/runs/..%2Fsecret.txt", "/api/runs/-1"),
        *("/api/runs/%2Fetc%2Fpasswd", "/api/runs/0/..%2F..%2Fsecret.txt", "/api/runs/0/config"),
        *("/page/../app.py", "/page/..%2Fapp.py", "/page/%2e%2e/app.py", "/page//etc/passwd"),
        *(
            "/../../secret.txt",
            "/page/..%5Capp.py",
            "/api/runs/0%00",
            "/page/..%2f..%2f..%2fsecret.txt",
        ),
    ],
)
def test_no_path_leads_out(runs, path):
    client = client_of(runs)
    client.get("/api/runs")
    answer = client.get(path)
    assert answer.status_code == 404 or (path == "/api/runs/.." and answer.status_code < 405)
    assert "secret" not in answer.text and "Starlette" not in answer.text


def test_wrong_questions(runs):
    client = client_of(runs)
    assert client.get("/api/runs/0?order=colour").status_code == 400
    assert client.get("/api/runs/0/graph?number=many").status_code == 404
    for ask in (client.post, client.put, client.delete):
        assert ask("/api/runs").status_code == 405


def test_a_foreign_name_of_this_machine_is_refused(runs):
    assert client_of(runs, where="http://evil.example").get("/api/runs").status_code == 400
    assert client_of(runs, where="http://localhost:7600").get("/api/runs").status_code == 200


def test_with_a_token_nothing_is_shown_without_it(runs):
    client = client_of(runs, token="open sesame", where="http://far.example")
    for path in ("/", "/api/runs", "/api/runs/0", "/plotly.js", "/page/view.js", "/?token=wrong"):
        answer = client.get(path)
        assert answer.status_code == 401 and "polytempo view" in answer.text
    assert client.get("/api/runs?token=open sesame").status_code == 401  # only the page takes it
    bearer = {"Authorization": "Bearer open sesame"}
    assert client.get("/api/runs", headers=bearer).status_code == 200
    answer = client.get("/", params={"token": "open sesame"})
    assert answer.status_code == 303 and answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert client.get("/").status_code == 200 and client.get("/api/runs").status_code == 200


def test_where_it_listens():
    with bind("127.0.0.1:0") as one:
        host, port = one.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(PolytempoError, match="choose another port"):
            bind(f"127.0.0.1:{port}")
    assert is_local("127.0.0.1") and not is_local("0.0.0.0") and not is_local("10.0.0.1")
    for wrong in ("7600", "host:port", "127.0.0.1:70000", ":80"):
        with pytest.raises(PolytempoError, match="HOST:PORT"):
            bind(wrong)


def test_a_saved_page_holds_all_that_it_needs(runs, make_run, tmp_path):
    evil = make_run("evil")
    (evil / "about.json").write_text('{"command": "</script><script>alert(1)</script>"}')
    np.savez(evil / "graph.npz", updates=[1], times=[0.5], matrices=np.zeros((1, 4, 4)))
    page = tmp_path / "report.html"
    assert save([runs], page) == 2
    text = page.read_text(encoding="utf8")
    assert "src=" not in text.partition("<script>")[0] and "/page/view" not in text
    assert "<script>alert" not in text
    kept = json.loads(text.partition('id="saved">')[2].partition("</script>")[0])
    answers = kept["answers"]
    listed = {run["name"]: run["key"] for run in answers["/api/runs"]["runs"]}
    assert listed.keys() == {"one", "evil"}
    assert answers[f"/api/runs/{listed['one']}"]["clients"]["counts"] == [3, 1, 0, 0]
    assert answers[f"/api/runs/{listed['evil']}/graph?number=0"]["updates"] == 1
    with pytest.raises(PolytempoError, match="no runs"):
        save([tmp_path / "nowhere"], page)
