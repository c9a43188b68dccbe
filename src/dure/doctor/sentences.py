"""The doctor's sentences, in both languages: what was found, and what to do about it."""

from __future__ import annotations

from dure.base.language import Language

Sentence = tuple[str, str]
"""What was found, and what to do about it."""

SENTENCES: dict[Language, dict[str, Sentence]] = {
    "en": {
        "reach.answers": ("answers", ""),
        "reach.alone": (
            "{looked} of the job's {wanted} nodes",
            "name all of them: --hosts, or cluster.hosts; or have Slurm give them: --slurm",
        ),
        "reach.no_slurm": (
            "only this machine: the job is for Slurm, whose commands are not here",
            "run it on the cluster's login node",
        ),
        "reach.silent": (
            "{reason}",
            "try `{attempt}`, and whether the same Python is at the same path there",
        ),
        "reach.failed": ("could not look: {reason}", "look again; if it stays, it is the doctor's own fault"),
        "image.closed": ("cannot go in: {reason}", "put that right on this node"),
        "versions.same": ("{versions}", ""),
        "versions.differ": (
            "{here}; the others have {there}",
            "install {there} here, or run all nodes in one image",
        ),
        "versions.missing": (
            "{versions}",
            "install torch here, or run all nodes in one image (cluster.image)",
        ),
        "cpu.same": ("{kind}", ""),
        "cpu.differ": (
            "{kind}; the others have {usual}: other bits",
            "use nodes of one kind, or set ATEN_CPU_CAPABILITY to the lesser on all of them",
        ),
        "digests.same": ("{files}", ""),
        "digests.differ": (
            "other bytes: {files}",
            "copy it from the leader, or keep it on the shared storage",
        ),
        "digests.missing": (
            "not there: {files}",
            "copy it to the same path here, or keep it on the shared storage",
        ),
        "storage.there": ("{path}", ""),
        "storage.lacks": ("{path} has no {missing}", "copy it there, or correct the path in the job"),
        "storage.no_bucket": (
            "{path}: {reason}",
            "make the bucket, or correct its name in the job, or AWS_ENDPOINT_URL here",
        ),
        "storage.no_credentials": (
            "{path}: there are no credentials here",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY on this node (ssh does not carry them there), or "
            "AWS_SKIP_SIGNATURE=true for a public bucket",
        ),
        "storage.denied": (
            "{path}: {reason}",
            "correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY here, or let them list, get, put and delete there",
        ),
        "storage.silent": (
            "{path}: {reason}",
            "start the server, correct AWS_ENDPOINT_URL, or let this node through to it",
        ),
        "storage.broken": ("{reason}", "until this works, neither data nor checkpoints can be there"),
        "storage.gone": ("{path} is not there", "mount the shared storage at {path} on this node"),
        "storage.empty": (
            "{path} is there, but not {missing}",
            "is it mounted here? `findmnt -T {path}`; else correct the path in the job",
        ),
        "both_ways.seen": ("reads what every node writes", ""),
        "both_ways.blind": (
            "does not see what {writers} wrote",
            "mount the same file system here; two folders of the same name are not shared",
        ),
        "read_only.refuses": ("{path} refuses writes", ""),
        "read_only.writable": (
            "can be written: {paths}",
            "mount it read-only here (`ro`), only checkpoints/ `rw`",
        ),
        "read_write.takes": ("{path} takes write, fsync and rename", ""),
        "read_write.puts": ("{path} takes put, conditional put, get and delete", ""),
        "read_write.unconditional": (
            "{path} ignores that a put is only for a new file",
            "use a server that knows If-None-Match, or a folder as checkpoint.folder: one run could write over "
            "another's manifest",
        ),
        "read_write.missing": (
            "{path} is not there",
            "make the folder on the storage, or mount it on this node",
        ),
        "read_write.read_only": ("{path} is read-only", "mount it read-write (`rw`) here"),
        "read_write.full": ("{path} is full", "free some space there, or choose another checkpoint.folder"),
        "read_write.refused": (
            "{path}: {reason}",
            "let this user write there, or choose another checkpoint.folder",
        ),
        "space.free": ("{free:size} in {path}", ""),
        "space.short": ("{free:size} in {path}; {need:size} may be needed", "free some space there"),
        "shm.free": ("{free:size}", ""),
        "shm.small": (
            "{free:size}; {need:size} may be needed",
            "mount -o remount,size=50% /dev/shm; in Docker --shm-size or --ipc=host",
        ),
        "shm.gone": ("not there: {reason}", "mount -t tmpfs shm /dev/shm"),
        "files.enough": ("{soft}; {need} may be needed", ""),
        "files.raised": ("{soft}, which a run raises to {need}", ""),
        "files.few": (
            "{hard} at most; {need} may be needed",
            "raise the hard limit (ulimit -Hn): /etc/security/limits.conf, LimitNOFILE in systemd, --ulimit in Docker",
        ),
        "clock.skew": ("{seconds:+.3f} s (± {within:.3f})", ""),
        "name.found": ("{name} is {address}", ""),
        "name.unknown": ("{name} cannot be resolved", "put it into DNS or /etc/hosts with its real address"),
        "name.loopback": (
            "{name} is {address}, which only this node can reach",
            "correct {name} in /etc/hosts to its real address",
        ),
        "interface.chosen": ("{name} ({address})", ""),
        "interface.missing": ("there is no {wanted} here; there is {there}", "correct cluster.interface"),
        "interface.loopback": (
            "{name} is {address}, which only this node can reach; there is {there}",
            "correct cluster.interface, or leave it out",
        ),
        "interface.none": ("{reason}", "correct the leader's address, or set cluster.interface"),
        "cores.enough": ("{cores} for {ranks} rank(s) of {threads} thread(s)", ""),
        "cores.few": (
            "{cores} for {ranks} rank(s) of {threads} thread(s): they take turns",
            "slower, never wrong; fewer team.ranks",
        ),
        "cores.idle": (
            "{cores} for {ranks} rank(s) of {threads} thread(s): some stay idle",
            "more team.ranks use them",
        ),
        "network.joined": ("{rate:rate} at least, {seconds:micro} at most", ""),
        "network.cut": (
            "{pairs}",
            "let TCP through between all nodes, all ports from 1024 up: agents and Gloo choose theirs",
        ),
        "network.taken": (
            "port {port} is taken here",
            "end what listens there (`ss -ltnp`), or give another --port",
        ),
    },
    "ko": {
        "reach.answers": ("응답함", ""),
        "reach.alone": (
            "작업의 노드 {wanted}개 중 {looked}개",
            "--hosts나 cluster.hosts로 모두 알려 주거나, --slurm으로 Slurm에서 받으세요",
        ),
        "reach.no_slurm": (
            "이 컴퓨터만: Slurm에서 실행할 작업인데 여기에는 Slurm 명령이 없음",
            "클러스터의 로그인 노드에서 실행하세요",
        ),
        "reach.silent": (
            "{reason}",
            "`{attempt}`가 되는지, 같은 경로에 같은 Python이 있는지 확인하세요",
        ),
        "reach.failed": ("살펴보지 못함: {reason}", "다시 해 보세요; 계속되면 doctor 자체의 잘못입니다"),
        "image.closed": (
            "들어갈 수 없음: {reason}",
            "이 노드에서 고치세요",
        ),
        "versions.same": ("{versions}", ""),
        "versions.differ": (
            "{here}; 다른 노드는 {there}",
            "이 노드에 {there}을(를) 설치하거나, 모든 노드를 한 이미지에서 실행하세요",
        ),
        "versions.missing": (
            "{versions}",
            "torch를 설치하거나, 모든 노드를 한 이미지에서 실행하세요 (cluster.image)",
        ),
        "cpu.same": ("{kind}", ""),
        "cpu.differ": (
            "{kind}; 다른 노드는 {usual}: 비트가 달라집니다",
            "같은 종류의 노드를 쓰거나, 모든 노드에 ATEN_CPU_CAPABILITY를 낮은 쪽으로 맞추세요",
        ),
        "digests.same": ("{files}", ""),
        "digests.differ": ("내용이 다름: {files}", "리더에서 복사하거나, 공유 저장소에 두세요"),
        "digests.missing": ("없음: {files}", "같은 경로에 복사하거나, 공유 저장소에 두세요"),
        "storage.there": ("{path}", ""),
        "storage.lacks": ("{path}에 {missing} 없음", "그곳에 복사하거나, 작업 파일의 경로를 고치세요"),
        "storage.no_bucket": (
            "{path}: {reason}",
            "버킷을 만들거나, 작업 파일의 이름 또는 이 노드의 AWS_ENDPOINT_URL을 고치세요",
        ),
        "storage.no_credentials": (
            "{path}: 여기에 자격 증명이 없음",
            "이 노드에 AWS_ACCESS_KEY_ID와 AWS_SECRET_ACCESS_KEY를 설정하거나 (ssh로는 전달되지 않음), 공개 버킷이면 "
            "AWS_SKIP_SIGNATURE=true로 하세요",
        ),
        "storage.denied": (
            "{path}: {reason}",
            "AWS_ACCESS_KEY_ID와 AWS_SECRET_ACCESS_KEY를 고치거나, 그곳에서 list, get, put, delete를 허용하세요",
        ),
        "storage.silent": (
            "{path}: {reason}",
            "서버를 켜거나, AWS_ENDPOINT_URL을 고치거나, 이 노드에서 서버로 가는 길을 여세요",
        ),
        "storage.broken": ("{reason}", "이것이 되기 전에는 데이터도 체크포인트도 둘 수 없습니다"),
        "storage.gone": ("{path} 없음", "이 노드의 {path}에 공유 저장소를 마운트하세요"),
        "storage.empty": (
            "{path}은(는) 있지만 {missing} 없음",
            "마운트되어 있나요? `findmnt -T {path}`; 아니면 작업 파일의 경로를 고치세요",
        ),
        "both_ways.seen": ("모든 노드가 쓴 것을 읽음", ""),
        "both_ways.blind": (
            "{writers}이(가) 쓴 것이 보이지 않음",
            "같은 파일 시스템을 마운트하세요; 이름만 같은 두 폴더는 공유가 아닙니다",
        ),
        "read_only.refuses": ("{path}은(는) 쓰기를 거부함", ""),
        "read_only.writable": (
            "쓸 수 있음: {paths}",
            "읽기 전용(`ro`)으로, checkpoints/만 `rw`로 마운트하세요",
        ),
        "read_write.takes": ("{path}에 write, fsync, rename 가능", ""),
        "read_write.puts": ("{path}에 put, 조건부 put, get, delete 가능", ""),
        "read_write.unconditional": (
            "{path}은(는) 새 파일일 때만 쓰라는 조건을 무시함",
            "If-None-Match를 아는 서버를 쓰거나, checkpoint.folder를 폴더로 하세요: 다른 실행의 매니페스트를 덮어쓸 수 "
            "있습니다",
        ),
        "read_write.missing": ("{path} 없음", "저장소에 폴더를 만들거나, 이 노드에 마운트하세요"),
        "read_write.read_only": ("{path}은(는) 읽기 전용", "읽기·쓰기(`rw`)로 마운트하세요"),
        "read_write.full": ("{path}이(가) 가득 참", "공간을 비우거나, 다른 checkpoint.folder를 쓰세요"),
        "read_write.refused": (
            "{path}: {reason}",
            "이 사용자의 쓰기를 허용하거나, 다른 checkpoint.folder를 쓰세요",
        ),
        "space.free": ("{path}에 {free:size}", ""),
        "space.short": ("{path}에 {free:size}; {need:size}가 필요할 수 있음", "공간을 비우세요"),
        "shm.free": ("{free:size}", ""),
        "shm.small": (
            "{free:size}; {need:size}가 필요할 수 있음",
            "mount -o remount,size=50% /dev/shm; Docker에서는 --shm-size 또는 --ipc=host",
        ),
        "shm.gone": ("없음: {reason}", "mount -t tmpfs shm /dev/shm"),
        "files.enough": ("{soft}; {need}개가 필요할 수 있음", ""),
        "files.raised": ("{soft}; 실행이 {need}(으)로 올림", ""),
        "files.few": (
            "최대 {hard}; {need}개가 필요할 수 있음",
            "하드 한도(ulimit -Hn)를 올리세요: /etc/security/limits.conf, systemd의 LimitNOFILE, Docker의 --ulimit",
        ),
        "clock.skew": ("{seconds:+.3f} 초 (± {within:.3f})", ""),
        "name.found": ("{name} = {address}", ""),
        "name.unknown": ("{name}의 주소를 찾을 수 없음", "실제 주소를 DNS나 /etc/hosts에 넣으세요"),
        "name.loopback": (
            "{name} = {address}: 이 노드에서만 닿는 주소",
            "/etc/hosts에서 {name}을(를) 실제 주소로 고치세요",
        ),
        "interface.chosen": ("{name} ({address})", ""),
        "interface.missing": ("{wanted} 없음; 있는 것: {there}", "cluster.interface를 고치세요"),
        "interface.loopback": (
            "{name} = {address}: 이 노드에서만 닿는 주소; 있는 것: {there}",
            "cluster.interface를 고치거나 빼세요",
        ),
        "interface.none": ("{reason}", "리더의 주소를 고치거나, cluster.interface를 정하세요"),
        "cores.enough": ("{cores}개, 랭크 {ranks}개 × 스레드 {threads}개", ""),
        "cores.few": (
            "{cores}개, 랭크 {ranks}개 × 스레드 {threads}개: 번갈아 씁니다",
            "느릴 뿐 결과는 같습니다; team.ranks를 줄이세요",
        ),
        "cores.idle": (
            "{cores}개, 랭크 {ranks}개 × 스레드 {threads}개: 일부는 쉽니다",
            "team.ranks를 늘리면 씁니다",
        ),
        "network.joined": ("최소 {rate:rate}, 최대 {seconds:micro}", ""),
        "network.cut": (
            "{pairs}",
            "모든 노드 사이의 TCP를 1024번부터 모든 포트에서 여세요: 에이전트와 Gloo가 골라 씁니다",
        ),
        "network.taken": (
            "포트 {port}을(를) 이미 쓰고 있음",
            "쓰고 있는 것을 끝내거나 (`ss -ltnp`), --port를 바꾸세요",
        ),
    },
}
