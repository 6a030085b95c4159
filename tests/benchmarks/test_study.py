"""`benchmarks/study.py`: a study's interval keeps its error rate, and Student's does not."""

import study


def test_error_rates() -> None:
    found = study.measure(study.Options(studies=400, seeds=30))
    assert found["steppe study"]["effect 0"]["wrong %"] <= 5
    assert found["five looks"]["effect 0"]["wrong %"] <= 5
    assert found["usual"]["effect 0"]["wrong %"] > 10
    assert found["steppe study"]["effect 2"]["right %"] > 99
