"""The server's page: its headers, and chats in a real browser with a server whose models write what
the tests say."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from types import SimpleNamespace

import pytest

from tests.browser import Browser
from tests.components.serving.servers import listening
from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.serving.app import Limits, ServedModel, create_app
from torchtitan.components.serving.errors import RequestError
from torchtitan.components.serving.jobs import Job, Update
from torchtitan.components.serving.page import chat_page
from torchtitan.components.serving.prompts import Preparer

pytest.importorskip("httpx")

from starlette.testclient import TestClient  # noqa: E402

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant: "
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

HOSTILE = (
    "</div></script><script>window.hit = 1</script><img src=x onerror='window.hit = 1'>"
    "<svg onload='window.hit = 1'></svg><iframe srcdoc='<b>x</b>'></iframe>"
    "<style>body { display: none }</style><a href='javascript:window.hit = 1'>x</a>&lt;b&gt;"
    "{{ 1 + 1 }}${window.hit = 1}\u202e\u0000" + "wide" * 300 + "Z" + "\u0301" * 300
)

CALL = f'{{"name": "add", "arguments": {{"text": "<img src=x onerror=hit()>", "{"k" * 200}": 1}}}}'

SCRIPTS: dict[str, Sequence[str | Exception]] = {
    "hello": ["Good ", "morning", "."],
    "hostile": [f"<think>\n{HOSTILE}", "\n</think>\n\n", *re.findall(".{1,40}", HOSTILE)],
    "call": [f"Let me add.<tool_call>{CALL}</tool_call>"],
    "break": ["Half of", RequestError("the model failed <b>badly</b>", status=500)],
    "cut": ["Half of", OSError()],
    "full": [RequestError("256 texts wait already", status=429)],
    "endless": ["on and "] * 100_000,
}
"""What a model writes after a text with one of these words, its last one."""


class Script:
    """Stands in for a scheduler: plays one of `SCRIPTS`."""

    def __init__(self, tokenizer):
        self.prompts: list[str] = []
        self.jobs: list[Job] = []
        self.n_left = 0  # texts whose client left
        self.is_alive = True
        self._tokenizer = tokenizer

    def start(self) -> None: ...

    def close(self) -> None: ...

    def check_room(self, n_prompts: int, n: int) -> None: ...

    def submit(self, jobs: Sequence[Job]) -> "Play":
        self.jobs += jobs
        prompt = self._tokenizer.decode(jobs[0].prompt, skip_special_tokens=True)
        self.prompts.append(prompt)
        words = SCRIPTS[max(SCRIPTS, key=prompt.rfind)]
        if isinstance(words[0], RequestError):
            raise words[0]
        return Play(self, words)


class Play(contextlib.AbstractContextManager):
    """The updates of one script."""

    def __init__(self, script: Script, words: Sequence[str | Exception]):
        self._script = script
        self._words = words
        self._is_over = False

    def __exit__(self, *exception: object) -> None:
        self._script.n_left += not self._is_over

    async def updates(self) -> AsyncIterator[Update]:
        for words in self._words:
            if isinstance(words, Exception):
                self._is_over = True
                if isinstance(words, OSError):
                    # A browser drops what it has not read when the connection breaks.
                    await asyncio.sleep(1)
                raise words
            yield Update(0, words, n_generated=1)
            await asyncio.sleep(0.002)
        self._is_over = True
        yield Update(0, finish_reason="stop")


def app_of(tokenizer, key="", views=None):
    """Return an application with two models that chat and one that has no template, and the
    scripts of these."""
    scripts = {}
    served = []
    for name in ("one", "two<b>", "plain"):
        template = None if name == "plain" else ChatTemplate(TEMPLATE, name="the template")
        preparer = Preparer(
            tokenizer, [], context=100_000, vocab_size=tokenizer.vocab_size, template=template
        )
        scripts[name] = Script(tokenizer)
        description = {"checkpoint": "step-10"}
        model = ServedModel(
            name=name, preparer=preparer, scheduler=scripts[name], description=description
        )
        served.append(model)
    hosts = () if key else ("localhost", "127.0.0.1")
    return create_app(served, Limits(api_key=key, hosts=hosts), views), scripts


# Headers.


def test_the_page_is_confined(tokenizer):
    app, _ = app_of(tokenizer)
    with TestClient(app, base_url="http://localhost") as client:
        answer = client.get("/")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        policy = dict(
            rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; ")
        )
        assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["frame-ancestors"] == policy["trusted-types"] == "'none'"
        assert policy["connect-src"] == "'self'"
        for tag in ("script", "style"):
            assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy[f"{tag}-src"])
        assert not re.search(r"unsafe|https?:|\*", answer.headers["content-security-policy"])
        # another web page may neither send a form, nor use a name of its own for this machine
        assert client.post("/").status_code == 405
        assert client.get("/", headers={"host": "evil.example"}).status_code == 421
        sent = client.post("/v1/completions", content="{}", headers={"content-type": "text/plain"})
        assert sent.status_code == 415


def test_the_page_is_the_same_with_and_without_a_key(tokenizer):
    """It needs no key, so it has nothing that only those with a key may see."""
    app, _ = app_of(tokenizer, key="secret")
    with TestClient(app, base_url="http://localhost") as client:
        assert client.get("/").text == chat_page().content
        assert client.get("/v1/models").status_code == 401
        client.headers["authorization"] = "Bearer secret"
        models = client.get("/v1/models").json()["data"]
    assert [model["has_chat_template"] for model in models] == [True, True, False]


def test_the_page_needs_no_other_file_and_makes_no_html():
    content = chat_page().content
    assert not re.search(r"https?://|\bsrc=|@import|url\(", content)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", content)
    # The policy allows neither, and a browser would ignore them.
    assert not re.search(r"<[^>]+ (style|on\w+)=", content.partition("<script>")[0])


# A browser.


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def opened(browser, tokenizer) -> Iterator[SimpleNamespace]:
    """The page in the browser, after the models are known; nothing may appear on the console."""
    app, scripts = app_of(tokenizer)
    with listening(app) as port:
        url = f"http://127.0.0.1:{port}/"
        browser.problems.clear()
        browser.open(url)
        browser.wait("models.length")
        yield SimpleNamespace(url=url, scripts=scripts)
        browser.run("running?.abort()")
        browser.open("about:blank")  # frees its connections
    assert browser.problems == []


def send(browser: Browser, text: str) -> None:
    browser.run("byId('input').focus()")
    browser.type(text)
    browser.press_enter()


def send_and_wait(browser: Browser, text: str) -> list[str]:
    """Send a text; return those of the answers."""
    n_turns = browser.run("turns.length")
    send(browser, text)
    browser.wait(f"turns.length === {n_turns + 1} && !running")
    return browser.run("turns.at(-1).answers.map(answer => answer.text.textContent)")


def choose(browser: Browser, name: str, value: str) -> None:
    browser.run(f"byId('{name}').value = '{value}'")
    browser.run(f"byId('{name}').dispatchEvent(new Event('change'))")


@pytest.mark.slow
def test_chats(browser, opened):
    """Messages are sent with the settings, answers arrive in parts, and later messages follow
    them."""
    browser.run("byId('system').value = 'Be brief.'")
    values = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3}
    for name, value in {**values, "max_tokens": 40}.items():
        browser.run(f"settingsForm.elements['{name}'].value = '{value}'")
    assert send_and_wait(browser, "Say hello") == ["Good morning."]
    assert send_and_wait(browser, "hello again") == ["Good morning."]
    script = opened.scripts["one"]
    assert script.prompts[-1] == (
        "system: Be brief.\nuser: Say hello\nassistant: Good morning.\nuser: hello again\nassistant: "
    )
    job = script.jobs[-1]
    found = {name: getattr(job.sampling, name) for name in values if name != "seed"}
    assert found | {"seed": 3} == values and job.max_new_tokens == 40 and job.key == "3/0"
    note = browser.run("document.querySelector('.answer .note').textContent")
    assert re.fullmatch(r"3 tokens · \d+\.\d s", note)
    # An impossible setting is not sent.
    browser.run("settingsForm.elements.top_p.value = '2'")
    send(browser, "hello")
    assert len(script.prompts) == 2 and browser.run("input.value") == "hello"
    browser.run("byId('new').click()")
    assert browser.run("[turns.length, log.children.length]") == [0, 0]


@pytest.mark.slow
def test_answers_appear_while_they_are_written_and_can_be_stopped(browser, opened):
    browser.open(opened.url, width=360, height=400)
    browser.wait("models.length")
    send(browser, "endless")
    browser.wait("turns[0]?.answers[0].content.length > 2000")
    # The page follows the text, also if much arrives at once, until the user scrolls back.
    browser.run("scrollBy(0, 10); turns[0].answers[0].write('\\n'.repeat(40))")
    to_end = "document.documentElement.scrollHeight - innerHeight - scrollY"
    browser.wait(f"{to_end} < 30")
    browser.run("scrollTo(0, 100)")
    n_characters = browser.run("turns[0].answers[0].content.length")
    browser.wait(f"turns[0].answers[0].content.length > {n_characters} + 500")
    assert browser.run("scrollY") == 100
    assert browser.run("byId('send').hidden && !byId('stop').hidden")
    browser.run("byId('stop').click()")
    browser.wait("!running")
    assert "stopped" in browser.run("document.querySelector('.answer .note').textContent")
    written = browser.run("turns[0].answers[0].content")
    assert written.startswith("on and on and ")
    # What was written belongs to the conversation, and the server has ended the text.
    send_and_wait(browser, "hello")
    script = opened.scripts["one"]
    assert f"assistant: {written}\n" in script.prompts[-1] and script.n_left == 1


@pytest.mark.slow
def test_errors_are_shown(browser, opened):
    problem = "document.querySelector('.turn:last-child .error').textContent"
    assert send_and_wait(browser, "full") == [""]
    assert browser.run(problem) == "256 texts wait already (status 429)"
    assert browser.run("input.value") == "full"
    browser.run("input.value = ''")
    assert send_and_wait(browser, "break") == ["Half of"]
    assert browser.run(problem) == "the model failed <b>badly</b>"
    browser.run("input.value = ''")
    assert send_and_wait(browser, "cut") == ["Half of"]
    assert browser.run(problem).startswith("the answer broke off")
    browser.run("input.value = ''; byId('tools').value = '[}'")
    send(browser, "hello")
    assert "tools is no valid JSON" in browser.run("byId('problem').textContent")
    browser.run("byId('tools').value = '[5]'; input.value = ''")
    send_and_wait(browser, "hello")
    assert "tools[0]" in browser.run(problem)
    browser.run("byId('tools').value = ''; input.value = ''")
    # Answers with an error are left out of the conversation.
    send_and_wait(browser, "hello")
    assert opened.scripts["one"].prompts[-1] == "user: hello\nassistant: "
    browser.run("fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    send_and_wait(browser, "hello")
    assert browser.run(problem).startswith("the server cannot be reached")


@pytest.mark.slow
def test_two_models_answer_one_message(browser, opened):
    assert send_and_wait(browser, "hello") == ["Good morning."]
    choose(browser, "second", "two<b>")
    assert send_and_wait(browser, "break") == ["Half of"] * 2
    browser.run("input.value = ''")
    assert send_and_wait(browser, "hello") == ["Good morning."] * 2
    heads = browser.run(
        "[...document.querySelectorAll('.turn:last-child h2')].map(e => e.textContent)"
    )
    assert heads == ["one", "two<b>"]
    # The second model has the conversation of the first one until it joins.
    prompt = "user: hello\nassistant: Good morning.\nuser: hello\nassistant: "
    assert opened.scripts["one"].prompts[-1] == opened.scripts["two<b>"].prompts[-1] == prompt
    left = "[...document.querySelectorAll('.turn:last-child .answer')].map(e => e.offsetLeft)"
    lefts = browser.run(left)
    assert lefts[0] < lefts[1]


@pytest.mark.slow
def test_a_model_without_a_template_continues_texts(browser, opened):
    choose(browser, "first", "plain")
    assert browser.run("mode.value") == "completion"
    assert browser.run("mode.options[0].disabled && byId('system').offsetParent === null")
    assert send_and_wait(browser, "Once, hello") == ["Once, helloGood morning."]
    assert opened.scripts["plain"].prompts == ["Once, hello"]
    choose(browser, "first", "one")
    assert browser.run("mode.value") == "chat"
    choose(browser, "second", "plain")
    assert browser.run("mode.value") == "completion"


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_hostile_answers_are_text(browser, opened, width, scheme, tmp_path):
    """In all places that show what a model writes, and no text makes the page wider."""
    browser.prefer(scheme)
    browser.open(opened.url, width=width)
    browser.wait("models.length")
    choose(browser, "second", "two<b>")
    tool = '[{"type": "function", "function": {"name": "add"}}]'
    browser.run(f"byId('tools').value = '{tool}'")
    texts = send_and_wait(browser, "hostile " + HOSTILE.replace("\u0000", "") + " hostile")
    assert [text.replace("\ufffd", "\u0000") for text in texts] == [HOSTILE] * 2
    thoughts = browser.run("turns[0].answers.map(answer => answer.thoughtText.textContent)")
    assert [text.replace("\ufffd", "\u0000") for text in thoughts] == [HOSTILE] * 2
    assert not browser.run("turns[0].answers[0].thoughts.open")
    browser.run("turns[0].answers[0].thoughts.open = true")
    assert send_and_wait(browser, "call") == ["Let me add."] * 2
    [called, _] = browser.run("[...document.querySelectorAll('.call')].map(e => e.textContent)")
    assert called.startswith('add {"text": "<img src=x onerror=hit()>"')
    assert send_and_wait(browser, "hello") == ["Good morning."] * 2
    prompt = opened.scripts["two<b>"].prompts[-1]
    assert "assistant: <think>\n</div></script>" in prompt and "Let me add.<tool_call>{" in prompt
    browser.run("input.focus(); window.scrollTo(0, 0)")
    assert browser.run("window.hit") is None
    made = browser.run("[...document.querySelectorAll('#log *')].map(e => e.localName)")
    assert set(made) <= {"div", "article", "h2", "details", "summary", "p", "pre", "span"}
    assert browser.run("document.documentElement.scrollWidth") == width
    cut_off = "e => e.scrollWidth > e.clientWidth"
    for kind in (".text", ".call", ".user", ".answer", "h2"):
        assert not browser.run(f"[...document.querySelectorAll('#log {kind}')].some({cut_off})")
    shades = [
        sum(map(int, re.findall(r"\d+", browser.run(f"getComputedStyle(document.body).{name}"))))
        for name in ("backgroundColor", "color")
    ]
    assert (shades[0] < shades[1]) == (scheme == "dark")
    browser.save_picture(tmp_path / "page.png")


@pytest.mark.slow
def test_a_key_is_asked_for(browser, tokenizer):
    app, scripts = app_of(tokenizer, key="secret")
    with listening(app) as port:
        browser.problems.clear()
        browser.open(f"http://127.0.0.1:{port}/")
        browser.wait("!byId('key').hidden")
        assert browser.run("byId('problem').textContent") == "this server needs its API key"
        browser.type("wrong")
        browser.press_enter()
        browser.wait("byId('problem').textContent.includes('API key is missing or wrong')")
        browser.run("byId('key-text').focus()")
        browser.type("secret")
        browser.press_enter()
        browser.wait("models.length && byId('key').hidden && byId('problem').hidden")
        assert send_and_wait(browser, "hello") == ["Good morning."]
        stored = "[localStorage.length, sessionStorage.length, document.cookie, location.href]"
        assert browser.run(stored) == [0, 0, "", f"http://127.0.0.1:{port}/"]
        assert "secret" not in browser.run("document.documentElement.outerHTML")
        browser.open("about:blank")
    assert browser.problems == []


@pytest.mark.slow
def test_what_the_policy_forbids_is_noticed(browser, opened):
    """The tests above would fail for a page that breaks its own rules."""
    assert "exceptionDetails" in browser.call(
        "Runtime.evaluate", expression="document.body.innerHTML = '<b>x</b>'"
    )
    browser.run("document.body.append(Object.assign(new Image(), {src: '/x.png'}))")
    browser.wait("true")
    problems = " ".join(browser.problems)
    assert "TrustedHTML" in problems and "img-src" in problems
    browser.problems.clear()
