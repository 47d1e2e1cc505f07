"""The worked example of docs/testing.md runs, and its assertions hold."""

from helpers.pages import run_page


def test_the_loop_of_the_page_gives_every_request_its_own_text():
    made = run_page("docs/testing.md")
    assert len(made["numbers"]) > made["loop"].state.requests.length.shape[0]  # slots were used again
