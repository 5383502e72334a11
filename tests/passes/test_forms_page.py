"""docs/forms.md says what becomes of every form that it lists."""

from __future__ import annotations

import pytest

from tests.passes.forms import GROUPS, PATH, Form, generate
from tests.zoo import check

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FORMS = [form for forms in GROUPS.values() for form in forms]


def test_the_committed_page_is_the_generated_one() -> None:
    # On a difference: python -m tests.passes.forms
    assert PATH.read_text(encoding="utf-8") == generate()


@pytest.mark.parametrize("form", FORMS, ids=[form.text for form in FORMS])
def test_the_form_becomes_what_the_page_says(form: Form) -> None:
    outcome = check.run(form.build(), form.inputs(), exact=False, repeats=1)
    report = outcome.report
    assert not report.errors, report.errors
    assert outcome.operators == sorted(form.operators), str(report)
    if form.state == "left":
        assert any(form.reason in str(site.reason) for site in report.declined), str(report)
    else:
        assert not report.declined, str(report)
        assert bool(report.with_own_gates) == (form.state == "own gates"), str(report)
