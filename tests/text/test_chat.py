"""Chat templates: rendered as their makers mean it, and kept away from Python."""

from __future__ import annotations

import pytest

from pyggmlkv.errors import TextError
from pyggmlkv.text import ChatTemplate

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]


def test_messages_are_put_into_the_template() -> None:
    expected = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert ChatTemplate(CHATML).apply(HELLO) == expected


def test_the_generation_prompt_can_be_left_out() -> None:
    assert ChatTemplate(CHATML).apply(HELLO, add_generation_prompt=False).endswith("<|im_end|>\n")


def test_special_tokens_and_variables_are_there() -> None:
    template = ChatTemplate("{{ bos_token }}{{ mood }}{{ eos_token }}", "<s>", "</s>")
    assert template.apply(HELLO, variables={"mood": "calm"}) == "<s>calm</s>"


def test_blocks_leave_no_lines_behind() -> None:
    assert ChatTemplate("{% if true %}\n  {% set x = 1 %}\nyes{% endif %}").apply(HELLO) == "yes"


def test_tojson_keeps_characters_as_they_are() -> None:
    assert ChatTemplate("{{ messages | tojson }}").apply([{"role": "user", "content": "é<"}]) == (
        '[{"role": "user", "content": "é<"}]'
    )


def test_a_template_that_refuses_says_so_in_its_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TextError, match="roles must alternate"):
        template.apply(HELLO)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({}) }}",
        "{{ messages.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_reach_python(source: str) -> None:
    with pytest.raises(TextError):
        ChatTemplate(source).apply(HELLO)


def test_a_broken_template_is_refused_when_made() -> None:
    with pytest.raises(TextError, match="does not compile"):
        ChatTemplate("{% for %}")
