"""Which worker a process is: the environments of launchers, and every way in which they can be wrong.

The environments are what each launcher sets, by its documentation and by listings that users published. None of them
was recorded here, where there is none of these launchers.
"""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica_engine.errors import ClusterConfigError
from replica_engine.workers import Cluster, cluster, find_cluster
from replica_engine.workers.cluster import join_address, node_names, split_address

ID, NUMBER, ADDRESS = "REPLICA_ENGINE_PROCESS_ID", "REPLICA_ENGINE_NUM_PROCESSES", "REPLICA_ENGINE_COORDINATOR"
RANK_OF_SLURM, TASKS, NODES = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"
URI = "OMPI_MCA_orte_hnp_uri"

OURS = {ID: "1", NUMBER: "3", ADDRESS: "10.0.0.1:4000"}


TFJOB = {
    "TF_CONFIG": json.dumps(
        {
            "cluster": {
                "chief": ["mnist-chief-0.kubeflow.svc:2222"],
                "worker": ["mnist-worker-0.kubeflow.svc:2222", "mnist-worker-1.kubeflow.svc:2222"],
            },
            "task": {"type": "worker", "index": 1},
            "environment": "cloud",
        }
    )
}

RAY_TRAIN = {
    "TF_CONFIG": '{"cluster": {"worker": ["10.0.0.4:46113", "10.0.0.5:39847"]}, "task": {"type": "worker", "index": 0}}'
}

KERAS = {
    "KERAS_DISTRIBUTION_JOB_ADDRESSES": "10.0.0.1:1234,10.0.0.2:2345",
    "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
    "KERAS_DISTRIBUTION_PROCESS_ID": "1",
}

JAX = {  # as the runtime for JAX of Kubeflow Trainer sets them
    "JAX_COORDINATOR_ADDRESS": "train-node-0-0.train:6666",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "1",
    "JOB_COMPLETION_INDEX": "1",
}

TORCHRUN = {
    "LOCAL_RANK": "1",
    "RANK": "3",
    "GROUP_RANK": "1",
    "ROLE_RANK": "3",
    "ROLE_NAME": "default",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}

SLURM = {  # a step of four tasks on two nodes, without GPUs
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "n[01-04]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_LAUNCH_NODE_IPADDR": "10.19.0.68",
    "SLURM_LOCALID": "1",
    "SLURM_MPI_TYPE": "pmix",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "n[01-02]",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    RANK_OF_SLURM: "3",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    NODES: "n[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    TASKS: "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}

SLURM_BATCH_SCRIPT = {  # the script itself, outside of a step
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "n[01-04]",
    "SLURM_NTASKS": "4",
    RANK_OF_SLURM: "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}

OPEN_MPI = {  # of mpirun on two nodes
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_UNIVERSE_SIZE": "4",
    URI: "1495597056.0;tcp://10.0.0.1,10.148.0.1:34911",
}


def test_only_the_standard_library_is_imported():
    """A worker may join before it imports TensorFlow, and the launcher never does."""
    program = "import sys, replica_engine.workers.launcher; print({'tensorflow', 'numpy', 'jax'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"set()\n"


def test_our_own_variables():
    tasks = ("process 0", "process 1", "process 2")
    assert find_cluster(OURS) == Cluster(1, 3, "10.0.0.1:4000", tasks, ID)
    assert find_cluster({}) == Cluster(0, 1, "", ("process 0",), ""), "no launcher is one process"


def test_tfjob():
    found = find_cluster(TFJOB)
    assert (found.process_id, found.num_processes, found.source) == (2, 3, "TF_CONFIG")
    assert found.tasks == ("chief 0", "worker 0", "worker 1")
    assert found.addresses[0] == "mnist-chief-0.kubeflow.svc:2222"
    assert found.coordinator == "mnist-chief-0.kubeflow.svc:2223", "TensorFlow itself listens at 2222"


@pytest.mark.parametrize("text", ["", " ", "{}", '{"cluster": {}}'])
def test_no_cluster_in_tf_config_is_as_if_it_were_not_there(text):
    assert find_cluster({"TF_CONFIG": text}).source == ""
    assert find_cluster({"TF_CONFIG": text, **TORCHRUN}).source == "torchrun"


def test_workers_on_one_machine_leave_a_port_to_the_coordinator():
    config = {"cluster": {"worker": ["localhost:12345", "localhost:12346"]}, "task": {"type": "worker", "index": 1}}
    assert find_cluster({"TF_CONFIG": json.dumps(config)}).coordinator == "localhost:12347"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (RAY_TRAIN, (0, 2, "10.0.0.4:46114")),
        (KERAS, (1, 2, "10.0.0.1:1234")),
        ({**KERAS, "KERAS_DISTRIBUTION_JOB_ADDRESSES": "10.0.0.1:1234"}, (1, 2, "10.0.0.1:1234")),
    ],
    ids=["Ray Train", "Keras", "Keras, one address"],
)
def test_ray_train_and_keras(environ, expected):
    found = find_cluster(environ)
    assert (found.process_id, found.num_processes, found.coordinator) == expected


def test_jax():
    found = find_cluster(JAX)
    assert (found.process_id, found.num_processes, found.coordinator) == (1, 2, "train-node-0-0.train:6666")
    assert found.source == "JAX_PROCESS_ID"
    assert find_cluster({"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}).num_processes == 1
    by_hand = {**JAX, "JAX_COORDINATOR_ADDRESS": "", ADDRESS: "node-a:4000"}
    assert find_cluster(by_hand).coordinator == "node-a:4000"


def test_torchrun():
    """It listens at MASTER_PORT itself."""
    found = find_cluster(TORCHRUN)
    assert (found.process_id, found.num_processes, found.coordinator) == (3, 4, "node-a:29501")
    by_hand = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert find_cluster(by_hand).coordinator == "node-a:29500"


def test_slurm_without_gpus():
    found = find_cluster(SLURM)
    assert (found.process_id, found.num_processes, found.source) == (3, 4, "Slurm")
    host, port = split_address(found.coordinator)
    assert host == "n01"
    assert 60_999 < port < 2**16
    other_job = find_cluster({**SLURM, "SLURM_JOB_ID": "4712"})
    assert other_job.coordinator != found.coordinator, "two jobs on one node"
    assert find_cluster({**SLURM, RANK_OF_SLURM: "0", "SLURM_NODEID": "0"}).coordinator == found.coordinator
    assert find_cluster(SLURM_BATCH_SCRIPT).num_processes == 1


def test_open_mpi():
    found = find_cluster(OPEN_MPI)
    assert (found.process_id, found.num_processes, found.source) == (2, 4, "Open MPI")
    assert split_address(found.coordinator)[0] == "10.0.0.1"
    for host, changes in {
        "198.177.146.70": {URI: "1955.0;tcp://198.177.146.70:53997;tcp://10.10.10.4:53997"},  # of an older version
        "fe80::b9b": {URI: "1314521088.0;tcp6://[fe80::b9b,2620:10d::2]:43370"},  # of a newer one
        "127.0.0.1": {URI: "", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},  # on one host
    }.items():
        assert split_address(find_cluster({**OPEN_MPI, **changes}).coordinator)[0] == host


def test_open_mpi_that_does_not_tell_where_rank_0_is():
    with pytest.raises(ClusterConfigError, match="mpirun -x REPLICA_ENGINE_COORDINATOR=host:port"):
        find_cluster({**OPEN_MPI, URI: ""})
    assert find_cluster({**OPEN_MPI, URI: "", ADDRESS: "node-a:4000"}).coordinator == "node-a:4000"


def test_mpirun_in_a_job_of_slurm_counts_its_own_ranks():
    """mpirun starts one daemon on each node as a step, and the ranks inherit the daemon's variables."""
    found = find_cluster({**SLURM, TASKS: "2", RANK_OF_SLURM: "1", **OPEN_MPI})
    assert (found.source, found.process_id, found.num_processes) == ("Open MPI", 2, 4)


def test_the_order():
    every = {**OPEN_MPI, **TORCHRUN, **JAX, **KERAS, **TFJOB, **OURS}
    found = []
    for launcher in (OURS, TFJOB, KERAS, JAX, TORCHRUN, OPEN_MPI):
        found.append(find_cluster(every).source)
        every = {name: value for name, value in every.items() if name not in launcher}
    assert found == [ID, "TF_CONFIG", "KERAS_DISTRIBUTION_PROCESS_ID", "JAX_PROCESS_ID", "torchrun", "Open MPI"]
    assert find_cluster({**SLURM, **TORCHRUN}).source == "torchrun"


@pytest.mark.parametrize("launcher", [TFJOB, RAY_TRAIN, KERAS, JAX, TORCHRUN, SLURM, OPEN_MPI])
def test_the_users_address_counts_with_each_launcher(launcher):
    assert find_cluster({**launcher, ADDRESS: "[::1]:4000"}).coordinator == "[::1]:4000"


def tf_config(**changes):
    config = json.loads(TFJOB["TF_CONFIG"])
    return {"TF_CONFIG": json.dumps({**config, **changes})}


WRONG = {
    "no JSON": ({"TF_CONFIG": "{not json"}, "TF_CONFIG", "is not JSON"),
    "a list": ({"TF_CONFIG": "[1]"}, "TF_CONFIG", "the fields `cluster` and `task`"),
    "cluster": (tf_config(cluster=["a:1"]), "TF_CONFIG.cluster", "an object such as"),
    "ps": (
        tf_config(cluster={"worker": ["a:1"], "ps": ["b:1"]}),
        "TF_CONFIG.cluster",
        "names 'ps'. A parameter server",
    ),
    "evaluator": (
        tf_config(cluster={"chief": ["a:1"], "evaluator": ["b:1"]}),
        "TF_CONFIG.cluster",
        "names 'evaluator'. An evaluator runs beside",
    ),
    "evaluator's task": (tf_config(task={"type": "evaluator", "index": 0}), "TF_CONFIG.task.type", "evaluator"),
    "another kind": (tf_config(task={"type": "wörker", "index": 0}), "TF_CONFIG.task.type", "no task of type 'wörker'"),
    "no chief": (
        tf_config(cluster={"worker": ["a:1"]}, task={"type": "chief", "index": 0}),
        "TF_CONFIG.task.type",
        "one that the cluster has: worker",
    ),
    "two chiefs": (tf_config(cluster={"chief": ["a:1", "b:1"]}), "TF_CONFIG.cluster.chief", "one chief"),
    "chief and master": (
        tf_config(cluster={"chief": ["a:1"], "master": ["b:1"]}),
        "TF_CONFIG.cluster",
        "not with both",
    ),
    "no addresses": (tf_config(cluster={"worker": []}), "TF_CONFIG.cluster.worker", "a list of addresses"),
    "a bad address": (tf_config(cluster={"worker": ["a:1", "b"]}), "TF_CONFIG.cluster.worker[1]", '"host:port"'),
    "an address twice": (tf_config(cluster={"worker": ["a:1", "a:1"]}), "TF_CONFIG.cluster", "one address for each"),
    "dynamic workers": (
        {"TF_CONFIG": '{"sparseCluster": {"worker": {"1": "a:1"}, "ps": []}, "task": {"type": "worker", "index": 1}}'},
        "TF_CONFIG.sparseCluster",
        "`enableDynamicWorker: true`",
    ),
    "no task": (tf_config(task=None), "TF_CONFIG.task", "missing, but TF_CONFIG.cluster is set"),
    "a bad task": (tf_config(task="worker"), "TF_CONFIG.task", "an object such as"),
    "an index as text": (tf_config(task={"type": "worker", "index": "x"}), "TF_CONFIG.task.index", "whole number"),
    "an index too high": (
        tf_config(task={"type": "worker", "index": 2}),
        "TF_CONFIG.task.index",
        "is 2, but TF_CONFIG.cluster.worker says that there are 2: the index must be from 0 to 1",
    ),
    "our index too high": ({**OURS, ID: "3"}, ID, "REPLICA_ENGINE_NUM_PROCESSES says that there are 3"),
    "no number": ({ID: "0"}, NUMBER, "is missing"),
    "no index": ({NUMBER: "2"}, ID, "is missing"),
    "no coordinator": ({**OURS, ADDRESS: ""}, ADDRESS, "a free port on the host of worker 0"),
    "a bad coordinator": ({**TORCHRUN, ADDRESS: "node-a"}, ADDRESS, '"host:port"'),
    "zero workers": ({**OURS, NUMBER: "0"}, NUMBER, "at least 1"),
    "minus one": ({**OURS, ID: "-1"}, ID, "at least 0"),
    "Keras' addresses": (
        {**KERAS, "KERAS_DISTRIBUTION_NUM_PROCESSES": "3"},
        "KERAS_DISTRIBUTION_JOB_ADDRESSES",
        "1 or 3 addresses",
    ),
    "no master": ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR", "the name of the host of rank 0"),
    "no port": ({**TORCHRUN, "MASTER_PORT": "65536"}, "MASTER_PORT", "from 1 to 65534"),
    "jax's number": ({"JAX_PROCESS_ID": "0"}, "JAX_NUM_PROCESSES", "is missing, but JAX_PROCESS_ID is set"),
    "jax's index": ({"JAX_NUM_PROCESSES": "2"}, "JAX_PROCESS_ID", "is missing, but JAX_NUM_PROCESSES is set"),
    "jax's index too high": ({**JAX, "JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID", "there are 2"),
    "jax's address": ({**JAX, "JAX_COORDINATOR_ADDRESS": ""}, "JAX_COORDINATOR_ADDRESS", "is missing"),
    "jax's address without a port": ({**JAX, "JAX_COORDINATOR_ADDRESS": "a"}, "JAX_COORDINATOR_ADDRESS", '"host:port"'),
    "no nodes of Slurm": ({**SLURM, NODES: ""}, NODES, "is missing"),
    "two tasks of Slurm": ({TASKS: "2", RANK_OF_SLURM: "0"}, NODES, "missing, but SLURM_STEP_NUM_TASKS is set"),
    "no index of Slurm": ({TASKS: "2"}, RANK_OF_SLURM, "is missing"),
    "no tasks of Slurm": ({NODES: "n[1-2]", RANK_OF_SLURM: "0"}, TASKS, "missing, but SLURM_PROCID is set"),
    "no step of Slurm": ({**SLURM_BATCH_SCRIPT, RANK_OF_SLURM: "1"}, TASKS, "is missing"),
    "no index of Open MPI": ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK", "is missing"),
    "no number of Open MPI": ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE", "is missing"),
    "Slurm's nodes": ({**SLURM, NODES: "n[1-"}, NODES, "as Slurm writes it"),
    "Slurm's index": ({**SLURM, RANK_OF_SLURM: "4"}, RANK_OF_SLURM, "SLURM_STEP_NUM_TASKS says that there are 4"),
    "Open MPI's index": ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "x"}, "OMPI_COMM_WORLD_RANK", "whole number"),
}


@pytest.mark.parametrize(("environ", "field", "text"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(environ, field, text):
    with pytest.raises(ClusterConfigError) as caught:
        find_cluster(environ)
    assert caught.value.field == field
    assert str(caught.value).startswith(field)
    assert text in str(caught.value)


@pytest.fixture(autouse=True)
def _nothing_warned(monkeypatch):
    monkeypatch.setattr(cluster, "_warned", [])


@pytest.mark.parametrize(
    "environ",
    [
        {"JOB_COMPLETION_INDEX": "0"},
        {"JOB_COMPLETION_INDEX": "3"},
        {"TPU_WORKER_HOSTNAMES": "t1v-n-0,t1v-n-1", "TPU_WORKER_ID": "0"},
        {"JAX_COORDINATOR_ADDRESS": "node-a:1234"},
        {"KERAS_DISTRIBUTION_JOB_ADDRESSES": "node-a:1234"},
        {ADDRESS: "node-a:1234"},
        {"WORLD_SIZE": "2"},
        {"RANK": "0", "MASTER_ADDR": "node-a"},
        {"MASTER_ADDR": "node-a", "MASTER_PORT": "29500"},
        {"TF_CONFIG": '{"task": {"type": "worker", "index": 1}}'},
        {"PMI_SIZE": "4", "PMI_RANK": "0"},
        {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-node-a-1"},
        {"TPU_WORKER_ID": "1"},
        {"TPU_PROCESS_ADDRESSES": "node-a:8476,node-b:8476"},
        {"LOCAL_RANK": "1"},
        {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"AWS_BATCH_JOB_NUM_NODES": "2"},
        {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1"},
    ],
    ids=lambda environ: next(iter(environ)),
)
def test_one_of_several_without_a_place_is_warned_of_once(environ, caplog):
    for _ in range(2):
        assert find_cluster(environ).num_processes == 1
    (record,) = caplog.records
    name = next(iter(environ))
    assert record.message.startswith(f"{name} is ")
    assert "So it runs alone" in record.message
    alone = {ID: "0", NUMBER: "1"}
    cluster._warned.clear()
    assert find_cluster({**environ, **alone}).num_processes == 1
    assert len(caplog.records) == 1, "as the text says, these end it"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        SLURM_BATCH_SCRIPT,
        OURS,
        JAX,
        TORCHRUN,
        {**SLURM, "PMI_SIZE": "4", "PMI_RANK": "3"},
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
        {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"WORLD_SIZE": "1"},
        {"RANK": "general"},
        {"MASTER_ADDR": "localhost"},
        {"TF_CONFIG": '{"cluster": {}, "task": {"type": "chief", "index": 0}}'},
        {"SM_HOSTS": '["algo-1"]'},
        {"JOB_COMPLETION_INDEX": ""},
    ],
)
def test_one_process_or_one_that_knows_its_place_is_not_warned_of(environ, caplog):
    find_cluster(environ)
    assert not caplog.records


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node[1-3,07]", ["node1", "node2", "node3", "node07"]),
        ("a,b-[09-11],c.d", ["a", "b-09", "b-10", "b-11", "c.d"]),
        ("r[1-2]n[0,5]", ["r1n0", "r1n5", "r2n0", "r2n5"]),
        ("n[8-10]x", ["n8x", "n9x", "n10x"]),
    ],
)
def test_lists_of_nodes(text, names):
    assert node_names(text) == names


@pytest.mark.parametrize(
    "text", ["", ",", "a,", "n[", "n]", "n[[1]]", "n[1-]", "n[-1]", "n[a]", "n[3-1]", "n[]", "a b", "n[0-999999999]"]
)
def test_what_is_no_list_of_nodes(text):
    with pytest.raises(ClusterConfigError, match="as Slurm writes it"):
        node_names(text)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 20), st.integers(1, 4)), min_size=1), min_size=1)
)
def test_any_list_of_nodes(groups):
    names, parts = [], []
    for at, ranges in enumerate(groups):
        inside = []
        for first, more, width in ranges:
            inside.append(f"{first:0{width}d}-{first + more:0{width}d}")
            # As Slurm counts: the width is that of the first number as it is written.
            names += [f"h{at}-{number:0{len(f'{first:0{width}d}')}d}" for number in range(first, first + more + 1)]
        parts.append(f"h{at}-[{','.join(inside)}]")
    assert node_names(",".join(parts)) == names


def found_or_wrong(read):
    """What was read and "", or None and the field that the error names."""
    try:
        return read(), ""
    except ClusterConfigError as error:
        return None, error.field


@settings(deadline=None)
@given(st.text(alphabet="n0159[],- "))
def test_any_text_is_a_list_of_nodes_or_the_users_error(text):
    names, field = found_or_wrong(lambda: node_names(text))
    assert field == NODES or all(name.isprintable() and name for name in names)


HOSTS = st.one_of(st.from_regex(r"\A[a-z0-9][a-z0-9.-]{0,20}\Z"), st.ip_addresses().map(str))


@settings(deadline=None)
@given(HOSTS, st.integers(0, 2**16 - 1))
def test_any_address(host, port):
    assert split_address(join_address(host, port)) == (host, port)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from(["worker", "a:1", "b:2", "chief", "0", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["cluster", "task", "type", "index", "worker", "chief", "ps"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(JSON)
def test_any_tf_config_is_a_cluster_or_the_users_error(value):
    found, field = found_or_wrong(lambda: find_cluster({"TF_CONFIG": json.dumps(value)}))
    assert field.startswith("TF_CONFIG" if found is None else "")
    if found is not None:
        assert 0 <= found.process_id < found.num_processes == len(found.tasks)


NAMES = sorted({*OURS, *TFJOB, *KERAS, *JAX, *TORCHRUN, *SLURM, *OPEN_MPI, *cluster._SIGNS})
VALUES = st.sampled_from(["", "0", "1", "2", "-1", "x", "a:1", "a:1,b:2", "n[1-2]", "1e9", "٣", "{}", "True"])


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_any_environment_is_a_cluster_or_the_users_error(environ):
    found, field = found_or_wrong(lambda: find_cluster(environ))
    assert field.partition(".")[0].partition("[")[0] in NAMES if found is None else not field
    if found is not None:
        assert 0 <= found.process_id < found.num_processes == len(found.tasks)
        assert (found.coordinator == "") == (found.num_processes == 1)


def test_all_processes_of_a_job_come_to_one_address():
    config = json.loads(TFJOB["TF_CONFIG"])
    tasks = [("chief", 0), ("worker", 0), ("worker", 1)]
    found = [find_cluster(tf_config(task={"type": kind, "index": at}, cluster=config["cluster"])) for kind, at in tasks]
    assert [each.process_id for each in found] == [0, 1, 2]
    assert len({each.coordinator for each in found}) == 1
