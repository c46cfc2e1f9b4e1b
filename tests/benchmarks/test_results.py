"""The page of results says what its files say."""

import json

from benchmarks.results import FOLDER, PAGE, of_junit, page

JUNIT = """<testsuites><testsuite timestamp="2026-11-25T03:28:00">
<testcase classname="tests.gpu.test_a" name="test_x[1]" time="1.5"/>
<testcase classname="tests.gpu.test_a" name="test_x[2]" time="0.5"><failure message="m"/></testcase>
<testcase classname="tests.gpu.test_b" name="test_y" time="0"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_junit_is_counted(tmp_path):
    file = tmp_path / "gpu.xml"
    file.write_text(JUNIT)
    found = of_junit([file, file], commit="abc", device="a GPU")
    assert found["rows"]["tests/gpu/test_a.py"] == {
        "passed": 2, "failed": 2, "skipped": 0, "seconds": 4.0,
    }  # fmt: skip
    assert found["rows"]["all"] == {"passed": 2, "failed": 2, "skipped": 2, "seconds": 4.0}
    assert found["failed"] == {"tests/gpu/test_a.py::test_x[2]": 2}
    assert found["skipped because"] == {"no GPU": 2}
    assert found["date"] == "2026-11-25T03:28:00"  # of the run
    text = page({"gpu_tests": found})
    assert "## gpu_tests" in text
    assert "| tests/gpu/test_a.py | 2 | 2 | 0 | 4 |" in text
    assert "- failed, 2: `tests/gpu/test_a.py::test_x[2]`" in text
    assert "- skipped because, 2: no GPU" in text


def test_the_page_is_that_of_its_files():
    results = {file.stem: json.loads(file.read_text()) for file in FOLDER.glob("*.json")}
    assert results
    assert PAGE.read_text() == page(results)
