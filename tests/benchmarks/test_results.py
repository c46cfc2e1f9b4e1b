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
    found = of_junit([file], commit="abc", device="a GPU")
    assert found["rows"]["tests/gpu/test_a.py"] == {
        "passed": 1, "failed": 1, "skipped": 0, "seconds": 2.0,
    }  # fmt: skip
    assert found["rows"]["all"] == {"passed": 1, "failed": 1, "skipped": 1, "seconds": 2.0}
    assert found["failed"] == {"tests/gpu/test_a.py::test_x[2]": 1}
    assert found["skipped because"] == {"no GPU": 1}
    assert found["date"] == "2026-11-25T03:28:00"  # of the run
    text = page({"gpu_tests": found})
    assert "## gpu_tests" in text
    assert "| tests/gpu/test_a.py | 1 | 1 | 0 | 2 |" in text
    assert "- failed, 1: `tests/gpu/test_a.py::test_x[2]`" in text
    assert "- skipped because, 1: no GPU" in text


def test_a_test_counts_as_in_its_last_file(tmp_path):
    first, second = tmp_path / "first.xml", tmp_path / "second.xml"
    first.write_text(JUNIT)
    second.write_text(
        '<testsuites><testsuite timestamp="2026-11-25T04:00:00">'
        '<testcase classname="tests.gpu.test_a" name="test_x[2]" time="0.5"/>'
        "</testsuite></testsuites>"
    )
    found = of_junit([first, second], commit="abc", device="a GPU")
    assert found["rows"]["tests/gpu/test_a.py"]["passed"] == 2
    assert found["failed"] == {}


def test_the_page_is_that_of_its_files():
    results = {file.stem: json.loads(file.read_text()) for file in FOLDER.glob("*.json")}
    assert results
    assert PAGE.read_text() == page(results)
