"""A Slurm cluster of one node, this machine, bound to loopback."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests import limits

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "squeue")
_SBIN = "/usr/sbin"


def missing() -> list[str]:
    """The programs that a cluster needs and this machine lacks."""
    return [name for name in PROGRAMS if _find(name) is None]


def _find(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=_SBIN)


def _ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class SlurmCluster:
    """Daemons with a key, sockets, ports and folders of their own."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))  # sockets: short names
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))},
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Starts the daemons and waits until the node takes jobs."""
        folder = self.folder
        for name in ("state", "spool"):
            (folder / name).mkdir()
        key = folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        host, user = socket.gethostname().partition(".")[0], pwd.getpwuid(os.getuid()).pw_name
        controller_port, node_port = _ports(2)
        (folder / "slurm.conf").write_text(
            f"""\
ClusterName=steppe
SlurmctldHost={host}(127.0.0.1)
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 Gres=gpu:1 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
        )
        # A GPU in name only: what is proved is that the script asks for one.
        (folder / "gres.conf").write_text(f"NodeName={host} Name=gpu File=/dev/null\n")
        files = {"key-file": key, "socket": folder / "munge"}
        files |= {f"{kind}-file": folder / f"munge.{kind}" for kind in ("pid", "log", "seed")}
        self._daemon("munged", "--foreground", "--force", *(f"--{k}={v}" for k, v in files.items()))
        self._wait((folder / "munge").exists)
        self._daemon("slurmctld", "-D")
        self._daemon("slurmd", "-D", "-N", host)
        self._wait(lambda: self.run("sinfo", "-h", "-o", "%t").strip() == "idle")

    def _daemon(self, name: str, *options: str) -> None:
        command = [_find(name) or name, *options]
        with (self.folder / f"{name}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self.environment,
                    start_new_session=True,
                )
            )

    def _wait(self, condition, seconds: float = 400) -> None:
        deadline = time.monotonic() + limits.seconds(seconds)
        while not condition():
            dead = any(daemon.poll() is not None for daemon in self._daemons)
            if dead or time.monotonic() > deadline:
                logs = (f"{log.name}\n{log.read_text()}" for log in self.folder.glob("*.log"))
                raise RuntimeError("Slurm did not start:\n" + "\n".join(logs))
            time.sleep(0.1)

    def run(self, *command: str) -> str:
        """What a command of Slurm's prints."""
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=limits.seconds(600),
        )
        return done.stdout

    def idle(self) -> bool:
        """Whether no job is left."""
        return not self.run("squeue", "-h").strip()

    def stop(self) -> None:
        """Ends whatever was started: jobs are known by their environment, not by their parents."""
        mark = str(self.folder).encode()
        for _ in range(3):
            for process in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):
                    if (
                        mark in (process / "environ").read_bytes()
                        and int(process.name) != os.getpid()
                    ):
                        os.kill(int(process.name), signal.SIGKILL)
            time.sleep(0.1)
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
