"""`python -m tests.deployment.clean_root BUNDLE` does what deploy/Dockerfile says, without Docker.

As root, on Linux, with Debian's mmdebstrap. A minimal Debian is made in a temporary folder, which
stays with --root; deploy/install.sh runs in it over the files that .dockerignore lets in. Then the
image's command runs as the image's user on BUNDLE, first in its process namespace and alone in its
network: nothing can be written but /tmp and /dev/shm, and there are no capabilities. It must answer
on all its ports, come back when a model's process is killed, leave no zombies, and end well. All of
it again with the arguments of the Kubernetes manifest, which ask for an API key.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_trt.core.yaml_files import read_yaml

TREE = Path(__file__).parents[2]
DOCKERFILE = TREE / "deploy" / "Dockerfile"
OPENAI = "http://127.0.0.1:9000"
KEY = "clean-root-" + "k" * 16
AS_CLIENT = {"Authorization": f"Bearer {KEY}"}
_MINUTE_S = 60.0


def read_dockerfile() -> dict[str, str]:
    """The last of each instruction, its lines joined."""
    text = re.sub(r"\\\n", " ", DOCKERFILE.read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name: rest for name, _, rest in (line.partition(" ") for line in lines)}


def copy_context(folder: Path) -> None:
    """Copies what a build in the tree would see: tracked files that .dockerignore lets in."""
    lines = (TREE / ".dockerignore").read_text(encoding="utf-8").splitlines()
    wanted = [line[1:] for line in lines if line.startswith("!")]
    command = ["git", "-C", str(TREE), "ls-files", "-z", "--", *wanted]
    for name in filter(None, subprocess.check_output(command, text=True).split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(TREE / name, folder / name)


def make_root(root: Path, context: Path) -> None:
    """A minimal Debian, and the project in it, as a build of the image makes them."""
    subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=minbase", "bookworm", str(root)], check=True
    )
    # How this machine reaches its package indexes is no part of the image. Copies: what installs
    # packages in the root, as root, must reach no file outside.
    for name in ("resolv.conf", "hosts"):
        shutil.copyfile(Path("/etc", name), root / "etc" / name)
    settings = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    if "SSL_CERT_FILE" in os.environ:
        shutil.copyfile(os.environ["SSL_CERT_FILE"], root / "run" / "authorities.crt")
        settings |= dict.fromkeys(("PIP_CERT", "SSL_CERT_FILE"), "/run/authorities.crt")
    (root / "src").mkdir()
    script = [
        *mount_devices(root),
        f"mount --bind {context} {root}/src && mount -o remount,bind,ro {root}/src",
        f"exec chroot {root} sh /src/deploy/install.sh /src",
    ]
    settings["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"
    command = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", " && ".join(script)]
    subprocess.run(command, env=settings, check=True)


def mount_devices(root: Path) -> list[str]:
    """Commands that give the root /proc of its own and the few devices that a container has."""
    devices = ("null", "zero", "random", "urandom")
    return [
        f"mount -t proc proc {root}/proc",
        f"mount -t tmpfs tmpfs {root}/dev && mkdir {root}/dev/shm && chmod 1777 {root}/dev/shm",
        *(
            f"touch {root}/dev/{name} && mount --bind /dev/{name} {root}/dev/{name}"
            for name in devices
        ),
    ]


def start_image(root: Path, bundle: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
    """What the image does when it is run, with `bundle` on /bundle and a root that is read-only."""
    image = read_dockerfile()
    user, _, group = image["USER"].partition(":")
    command = [*json.loads(image["ENTRYPOINT"]), *arguments]
    (root / "bundle").mkdir(exist_ok=True)
    script = [
        f"mount --bind {root} {root} && mount -o remount,bind,ro {root}",
        f"mount --bind {bundle} {root}/bundle && mount -o remount,bind,ro {root}/bundle",
        f"mount -t tmpfs -o mode=1777 tmpfs {root}/tmp",
        *mount_devices(root),
        f"exec chroot {root} env -i {image['ENV']} setpriv --reuid {user} --regid {group} "
        '--clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all "$@"',
    ]
    inside = ["sh", "-c", " && ".join(script), "sh", *command]
    return subprocess.Popen(["unshare", "--mount", "--pid", "--fork", "--kill-child", *inside])


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in found]


def descendants(pid: int) -> list[int]:
    return [one for child in children(pid) for one in (child, *descendants(child))]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def fetch(url: str, body: Any = None) -> tuple[int, str]:
    """Status and content; status 0 where nobody answers."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | (AS_CLIENT if "/v1/" in url else {})
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < 2 * _MINUTE_S, f"never: {what}"
        time.sleep(0.1)
    print(f"{what} after {time.monotonic() - started:.1f} s", flush=True)


def is_healthy() -> bool:
    return fetch(f"{OPENAI}/health")[0] == 200


def is_healthy_to_docker(root: Path) -> bool:
    image = read_dockerfile()
    command = json.loads(image["HEALTHCHECK"].partition("CMD ")[2])
    return not subprocess.run(
        ["chroot", root, "env", "-i", *image["ENV"].split(), *command]
    ).returncode


def ask_all_ports() -> str:
    """A question to each port; the text of the OpenAI port's answer."""
    fields = {"model": "demo", "prompt": "jobs: red fox gold", "max_tokens": 24, "temperature": 0}
    code, answer = fetch(f"{OPENAI}/v1/completions", fields)
    assert code == 200, answer
    text = json.loads(answer)["choices"][0]["text"]
    grpc = ["generate", "--url", "grpc://127.0.0.1:8001", "--max-tokens", "24", "--json"]
    command = [sys.executable, "-m", "dflash_trt", *grpc, "--prompt", fields["prompt"]]
    assert json.dumps(text) in subprocess.check_output(command, text=True)
    for url in (f"{OPENAI}/metrics", "http://127.0.0.1:8002/metrics"):
        code, figures = fetch(url)
        assert code == 200 and "# TYPE dflash_requests_total" in figures, url
    return str(text)


def serve(root: Path, bundle: Path) -> None:
    """Runs the image's command, and the manifest's; alone in its network."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    deployment = read_yaml(TREE / "deploy" / "kubernetes" / "deployment.yaml")
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    (root / "etc/dflash-trt").mkdir(exist_ok=True)
    (root / "etc/dflash-trt/keys").write_text(f"{KEY}\n")
    for given in (json.loads(read_dockerfile()["CMD"]), arguments):
        print("with", *given, flush=True)
        hold(root, bundle, given)


def hold(root: Path, bundle: Path, arguments: list[str]) -> None:
    """Holds the image to what it promises."""
    process = start_image(root, bundle, arguments)
    try:
        wait_for("ready", is_healthy)
        print(f"all ports answer: {ask_all_ports()!r}")
        assert is_healthy_to_docker(root)
        (first,) = children(process.pid)
        running = descendants(first)
        for pid in (first, *running):
            assert status(pid)["Uid"].split() == ["10001"] * 4, command_of(pid)
            assert int(status(pid)["CapEff"], 16) == 0, command_of(pid)
        print(f"{1 + len(running)} processes, none of root, none with a capability")
        model = next(one for one in running if "triton_python_backend_stub" in command_of(one))
        os.kill(model, signal.SIGKILL)
        wait_for("a killed model is told at /health", lambda: not is_healthy())
        wait_for("back", is_healthy)
        ask_all_ports()
        left = [command_of(one) for one in descendants(first) if status(one)["State"][0] == "Z"]
        assert not left, left
        os.kill(first, signal.SIGTERM)
        code = process.wait(_MINUTE_S)
        assert code == 0, code
        print("no zombies; SIGTERM: exit code 0")
    finally:
        process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--root", type=Path, help="make the root here and keep it, or use it")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    bundle = given.bundle.resolve()
    if given.serve:
        serve(given.root, bundle)
        return
    with tempfile.TemporaryDirectory(prefix="clean-root-") as work:
        root = given.root.resolve() if given.root else Path(work, "root")
        if not (root / "opt/dflash-trt/bin/dflash-trt").exists():
            context = Path(work, "context")
            copy_context(context)
            started = time.monotonic()
            make_root(root, context)
            size = subprocess.check_output(["du", "-sxm", str(root)], text=True).split()[0]
            print(f"installed after {time.monotonic() - started:.0f} s, {size} MB")
        again = [sys.executable, "-m", "tests.deployment.clean_root", "--serve"]
        command = ["unshare", "--net", *again, "--root", str(root), str(bundle)]
        sys.exit(subprocess.run(command).returncode)


if __name__ == "__main__":
    main()
