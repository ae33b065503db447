"""`kvd llama-server`: answers as without it, sooner, whatever happens to the daemon."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
from pathlib import Path

import pytest

import kvd_client
from kvd.blobs import head_hash
from kvd.hashing import NamespaceDigest, encode_tokens, pack_hashes
from kvd.protocol.replies import Begun
from kvd.protocol.requests import Begin
from kvd.protocol.wire import unpack_block_ids
from kvd_client.core import blob_core
from kvd_client.core.verb import expect
from kvd_client.engines.llama_cpp.snapshots import STEP_TOKENS, Snapshots, _keys
from tests.engines.llama_cpp.servers import PlainServer, Server, SharingServer, model_path
from tests.support.daemon import running_daemon
from tests.support.wait import eventually

pytestmark = [pytest.mark.model, pytest.mark.timeout(600), pytest.mark.xdist_group("/dev/shm")]


def manual(name: str, num_lines: int = 12) -> str:
    """A text of about 15 tokens a line, unlike that of any other name."""
    return "".join(f"The part {name}-{i} of the machine has {i * 7 % 13} screws.\n" for i in range(num_lines))


def control(plain: PlainServer, prompt: str, *before: str, num_tokens: int = 8) -> str:
    """What the server says alone, when it has computed `before` first, one after the other in one slot.

    The same split of the prompt, so the very same arithmetic.
    """
    plain.complete("x", 1, id_slot=0, cache_prompt=False)
    for each in before:
        plain.complete(each, num_tokens, id_slot=0)
    return plain.complete(prompt, num_tokens, id_slot=0)["content"]


def test_another_server_goes_on_where_the_first_has_been(plain, first, second):
    text = manual("alpha")
    asked, other = text + "How many screws has part alpha-3?", text + "Name one part."
    cold = first.complete(asked)
    assert cold["timings"]["cache_n"] == 0
    first.await_saves(1)
    before = second.counters["restores"]
    warm = second.complete(other)
    assert second.counters["restores"] == before + 1
    assert warm["timings"]["cache_n"] >= cold["timings"]["prompt_n"] - 2 * STEP_TOKENS
    assert cold["content"] == control(plain, asked)
    assert warm["content"] == control(plain, other, asked)


def test_chats_stream_and_share(plain, first, second):
    messages = [{"role": "system", "content": manual("beta")}, {"role": "user", "content": "Which parts?"}]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    number = first.counters["saves"]
    answer = first.post("/v1/chat/completions", body)
    first.await_saves(number + 1)

    def streamed(server: Server, **more: object) -> tuple[str, dict[str, int]]:
        raw = json.dumps({**body, "stream": True, **more}).encode()
        status, headers, answer = server.raw("POST", "/v1/chat/completions", raw)
        assert status == 200
        assert headers["content-type"].startswith("text/event-stream")
        lines = [line[6:] for line in answer.decode().split("\n\n") if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        events = [json.loads(line) for line in lines[:-1]]
        text = "".join(choice["delta"].get("content") or "" for one in events for choice in one["choices"])
        return text, events[-1]["timings"]

    text, timings = streamed(second)
    assert timings["cache_n"] > 100
    plain.post("/v1/chat/completions", {**body, "id_slot": 0, "cache_prompt": False})
    assert text == streamed(plain, id_slot=0)[0], "the same split: all but the last token were there"
    assert (
        answer["choices"][0]["message"]["content"]
        == (
            plain.post("/v1/chat/completions", {**body, "id_slot": 0, "cache_prompt": False})["choices"][0]["message"][
                "content"
            ]
        )
    )


def test_the_longer_snapshot_is_taken_and_a_diverging_prompt_takes_what_is_common(first, second):  # case E6
    short, longer = manual("gamma", 8), manual("gamma", 16)
    number = first.counters["saves"]
    short_n = first.complete(short + "And?")["timings"]["prompt_n"]
    first.await_saves(number + 1)
    timings = first.complete(longer + "And?")["timings"]
    longer_n = timings["prompt_n"] + timings["cache_n"]
    first.await_saves(number + 2)
    taken = second.complete(longer + "So what?")["timings"]["cache_n"]
    assert longer_n - 2 * STEP_TOKENS <= taken <= longer_n
    diverging = manual("gamma", 12) + manual("delta", 8)
    taken = second.complete(diverging)["timings"]["cache_n"]
    assert short_n + STEP_TOKENS < taken < longer_n - STEP_TOKENS


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/health", None),
        ("GET", "/v1/models", None),
        ("GET", "/nowhere?x=%2F", None),
        ("POST", "/tokenize", b'{"content": "a b c"}'),
        ("POST", "/completion", b"{no json"),
        ("POST", "/v1/chat/completions", b'{"messages": "' + b"x" * 300 + b'"}'),
        ("POST", "/slots/0?action=save", b'{"filename": "mine"}'),
        ("OPTIONS", "/v1/chat/completions", None),
    ],
)
def test_everything_else_passes_through_unchanged(plain, first, method, path, body):
    ours, theirs = first.raw(method, path, body), plain.raw(method, path, body)
    assert ours[0] == theirs[0]
    volatile = {"date", "keep-alive", "connection", "server", "content-length", "transfer-encoding"}
    headers = [{k: v for k, v in each[1].items() if k not in volatile} for each in (ours, theirs)]
    if "slots" not in path:
        assert headers[0] == headers[1]

    def stable(raw: bytes) -> object:
        try:
            parsed = json.loads(raw)
        except ValueError:
            return raw
        return json.loads(json.dumps(parsed), object_hook=lambda one: {k: v for k, v in one.items() if k != "created"})

    assert stable(ours[2]) == stable(theirs[2])


def test_a_key_is_asked_for_as_the_server_does(second):
    second_headers, second.headers = second.headers, {}
    try:
        for path in ("/completion", "/v1/chat/completions"):
            assert second.raw("POST", path, json.dumps({"prompt": manual("epsilon")}).encode())[0] == 401
    finally:
        second.headers = second_headers


def test_who_goes_away_frees_the_slot(first):
    connection = first.connect()
    body = {"prompt": manual("zeta"), "n_predict": 400, "stream": True, "ignore_eos": True}
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    assert connection.getresponse().readline().startswith(b"data:")
    assert first.status()["slots_taken"] == 1
    connection.close()
    eventually(lambda: first.status()["slots_taken"] == 0)
    assert first.complete(manual("zeta") + "?", 1)["tokens_predicted"] == 1


def test_more_requests_than_slots_are_all_answered(plain, first):
    prompts = [manual("eta", 8) + f"Part {i}?" for i in range(5)]
    answers: dict[str, str] = {}

    def ask(prompt: str) -> None:
        answers[prompt] = first.complete(prompt, 4)["content"]

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answers) == set(prompts)
    assert first.status()["slots_taken"] == 0


def snapshots_of(client: kvd_client.Client, server: SharingServer) -> Snapshots:
    return Snapshots(client.blobs(server.name))


def tokens_of(server: Server, prompt: str) -> bytes:
    body = {"content": prompt, "add_special": True, "parse_special": True}
    return encode_tokens(server.post("/tokenize", body)["tokens"])


def await_snapshot(client: kvd_client.Client, server: SharingServer, prompt: str) -> None:
    tokens, snapshots = tokens_of(server, prompt), snapshots_of(client, server)
    eventually(lambda: snapshots.longest(tokens) == len(tokens) // 4 // STEP_TOKENS * STEP_TOKENS)


def flip_a_byte(client: kvd_client.Client, server: SharingServer, key: bytes) -> None:
    """In the middle of a state's second block, in the shared memory itself."""
    blobs = client.blobs(server.name)

    def verb(link):
        heads = yield from blob_core._open(link, blobs._spaces.heads)
        bodies = yield from blob_core._open(link, blobs._spaces.bodies)
        head = yield from blob_core._read_head(link, heads, head_hash(NamespaceDigest(heads.digest), key))
        hashes = head.body_hashes(NamespaceDigest(bodies.digest), blobs.block_nbytes)
        num = len(hashes)
        request = Begin(link.next_id(), link.epoch, bodies.handle, pack_hashes(hashes), num, num + 1, False)
        begun = expect((yield request), Begun)
        (run, *_) = bodies.memory.runs(unpack_block_ids(begun.blocks)[1:2], writable=False)
        fd = os.open(f"/proc/self/fd/{run.fd}", os.O_RDWR)
        os.pwrite(fd, bytes([os.pread(fd, 1, run.offset + 999)[0] ^ 1]), run.offset + 999)
        os.close(fd)

    client._runner.run(verb)


def test_a_state_with_a_flipped_byte_is_refused(plain, first, second, llama_daemon):  # case E5
    prompt = manual("theta", 10)
    first.complete(prompt)
    with kvd_client.connect(llama_daemon) as client:
        await_snapshot(client, first, prompt)
        key = _keys(tokens_of(first, prompt))[-1]
        assert client.blobs(first.name).get(key) is not None
        flip_a_byte(client, first, key)
        restores = second.counters["restores"]
        answer = second.complete(prompt + "Well?")
        assert answer["timings"]["cache_n"] < STEP_TOKENS
        assert second.counters["restores"] == restores
    assert answer["content"] == control(plain, prompt + "Well?")


def other_weights(folder: Path) -> Path:
    """The same shapes, and one bit of one weight different."""
    path = folder / model_path().name
    content = bytearray(model_path().read_bytes())
    content[-4711] ^= 1
    path.write_bytes(content)
    return path


def other_build(folder: Path) -> dict[str, str]:
    """The same code in another file: what a build of one's own is to us."""
    import xllamacpp

    package = folder / "xllamacpp"
    shutil.copytree(Path(xllamacpp.__file__).parent, package)
    with next(package.glob("*.so")).open("ab") as library:
        library.write(b"another build")
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize("what", ["weights", "dtype", "build", "slots"])
def test_what_another_model_dtype_or_build_left_is_never_loaded(first, llama_daemon, tmp_path, what):  # case E5
    prompt = manual("iota", 8)
    first.complete(prompt)
    with kvd_client.connect(llama_daemon) as client:
        await_snapshot(client, first, prompt)
    options = {"dtype": ["-ctk", "q8_0"], "slots": ["-np", "3"]}.get(what, [])
    model = other_weights(tmp_path) if what == "weights" else None
    environ = other_build(tmp_path) if what == "build" else {}
    with SharingServer(llama_daemon, *options, model=model, **environ) as server:
        assert server.name != first.name
        answer = server.complete(prompt, 1)
        assert answer["timings"]["cache_n"] == 0
        assert (server.counters["misses"], server.counters["restores"]) == (1, 0)
        server.await_saves(1)
        assert server.stop() == 0


def test_without_a_daemon_it_is_a_plain_server_and_later_it_is_not(plain, tmp_path):
    prompt = manual("kappa", 8)
    with SharingServer(tmp_path / "run") as server:
        assert server.complete(prompt)["content"] == control(plain, prompt)
        with running_daemon(tmp_path, budget="256MiB", segment="4MiB"):
            # Another prompt each time until the daemon is looked for again.
            def saved() -> bool:
                server.complete(manual(f"kappa{server.counters['misses']}", 6), 1)
                return server.counters["saves"] > 0

            eventually(saved, 60)
        assert server.stop() == 0


def test_a_killed_proxy_leaves_no_server_and_no_folder(llama_daemon, short_path):
    snapshots = short_path / "snapshots"
    snapshots.mkdir()
    with SharingServer(llama_daemon, snapshot_dir=snapshots) as server:
        (mine,) = snapshots.iterdir()
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        eventually(lambda: not any(Path(f"/proc/{child}/cmdline").exists() for child in children))
    assert mine.exists(), "nobody could remove it"
    with SharingServer(llama_daemon, snapshot_dir=snapshots) as server:
        assert not mine.exists(), "the next one does"
        assert server.stop() == 0
    assert list(snapshots.iterdir()) == []


def test_two_servers_one_daemon_restarted_in_between(plain, tmp_path):
    """No wrong answer, no error; at worst a recompute."""
    text = manual("lambda", 8)
    questions = [text + f"Question {i}: how many screws has part lambda-{i}?" for i in range(3)]
    right = {
        question: {
            control(plain, question),
            *(control(plain, question, other) for other in questions if other != question),
            control(plain, question, question),
        }
        for question in questions
    }
    tiers = {"redis": {"url": "embedded", "persistence": str(tmp_path / "kept")}, "drain_s": 20.0}
    wrong: list[tuple[str, str]] = []
    with (
        running_daemon(tmp_path, budget="256MiB", segment="4MiB", tiers=tiers) as daemon,
        SharingServer(daemon.folder) as one,
        SharingServer(daemon.folder) as two,
    ):
        stop = threading.Event()

        def ask(server: SharingServer) -> None:
            number = 0
            while not stop.is_set() or number < 6:
                question = questions[number % 3]
                answer = server.complete(question)["content"]
                if answer not in right[question]:
                    wrong.append((question, answer))
                number += 1

        threads = [threading.Thread(target=ask, args=(server,)) for server in (one, two)]
        for thread in threads:
            thread.start()
        try:
            eventually(lambda: one.counters["saves"] + two.counters["saves"] > 0, 60)
            assert daemon.stop() == 0
            daemon.start()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not wrong
        # The new daemon serves: a third server finds what the old one left.
        with SharingServer(daemon.folder) as three:
            answer = three.complete(questions[0])
            assert three.counters["restores"] == 1
            assert answer["content"] in right[questions[0]]
            assert three.stop() == 0
        assert (one.stop(), two.stop()) == (0, 0)


def test_a_server_that_ends_ends_the_proxy_with_its_code(tmp_path):
    server = SharingServer(tmp_path / "run", "--no-such-option", "1")
    try:
        assert server.process.wait(60) == 1
        assert "--no-such-option" in server.log()
    finally:
        server.process.kill()


def test_it_listens_on_a_socket_file_as_llama_server_does(tmp_path):
    place = tmp_path / "here.sock"
    server = SharingServer(tmp_path / "run", "--host", str(place))
    try:
        eventually(place.is_socket, 60)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(place))
            client.sendall(b"GET /kvd/status HTTP/1.0\r\n\r\n")
            assert b'"why_not"' in b"".join(iter(lambda: client.recv(4096), b""))
        assert server.stop() == 0
    finally:
        server.process.kill()
