"""Accelerate with an FSDP configuration on XLA, against plain training in one process."""

import os
from unittest import mock

import pytest
import torch
from hf_models import (
    BATCH,
    CLIP,
    STEPS,
    Trained,
    accelerator_for,
    assert_alike,
    batch_of,
    build,
    by_class,
    groups_of,
    optimizer_for,
    plain,
    rows,
)
from on_ranks import on_each_rank, slow

from xla_fsdp.integrations.launch import environment_of, read_config

TIMEOUT = 400
YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: 2
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
main_training_function: main
mixed_precision: bf16
num_processes: 2
"""


def train(accelerator, model, optimizer, loader):
    trained, losses = Trained(), []
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            losses.append(accelerator.reduce(loss.detach(), "mean"))
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            trained.losses.append(sum(one.item() for one in losses) / len(losses))
            trained.norms.append(norm.item())
            losses = []
    trained.weights = accelerator.get_state_dict(model)
    return trained


def several(rank, cases):
    """Each case: model, order of prepare, accumulation, and what the plugin is told."""
    found = []
    os.environ["XLA_FSDP_HYBRID_SHARD_SIZE"] = "2"
    for name, order, micro, given in cases:
        accelerator = accelerator_for(steps=micro, **(by_class(name) | given))
        model = build(name)
        optimizer = optimizer_for(groups_of(model))
        size = BATCH // accelerator.num_processes // micro
        loader = torch.utils.data.DataLoader(rows(name), batch_size=size, collate_fn=batch_of)
        if order == "one by one":
            optimizer = accelerator.prepare(optimizer)
            loader = accelerator.prepare(loader)
            model = accelerator.prepare(model)
        elif order == "optimizer first":
            optimizer, loader, model = accelerator.prepare(optimizer, loader, model)
        else:
            model, loader, optimizer = accelerator.prepare(model, loader, optimizer)
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        assert sizes == [len(group["params"]) for group in groups_of(build(name))]
        found.append(train(accelerator, model, optimizer, loader))
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
        copies = given.get("sharding_strategy") in ("NO_SHARD", "HYBRID_SHARD", "5")
        assert (model.fsdp_options.replication_groups is not None) == copies
    return found


OFFLOADED = dict(cpu_offload=True)
IGNORED = dict(ignored_modules=r"classifier|.*\.pooler")
HYBRID = dict(sharding_strategy="HYBRID_SHARD", activation_checkpointing=True) | OFFLOADED
BY_SIZE = dict(sharding_strategy="5", auto_wrap_policy="size_based_wrap", min_num_params=500)
CASES = [
    ("gpt2", "one by one", 2, dict(fsdp_version=2, reshard_after_forward=False) | OFFLOADED),
    ("bert", "optimizer first", 1, dict(reshard_after_forward="SHARD_GRAD_OP") | IGNORED),
    ("llama", "model first", 1, HYBRID),
    ("vit", "one by one", 1, dict(sharding_strategy="NO_SHARD", sync_module_states=True)),
    ("t5", "model first", 1, BY_SIZE),
]


@pytest.mark.parametrize("cases", [CASES[:1], slow(CASES[1:])])
def test_training_is_that_of_one_process(run_ranks, cases):
    found = run_ranks(several, 4, cases, timeout=TIMEOUT)
    for number, (name, _, micro, _) in enumerate(cases):
        assert_alike(found[0][number], plain(name, micro=micro))


def halves(step):
    return 0.5**step


class Registered:
    """An average of a parameter, as shards."""

    def __init__(self, model):
        self.value = next(model.parameters()).detach().clone()

    def state_dict(self):
        return {"averages": [self.value]}

    def load_state_dict(self, state):
        self.value.copy_(state["averages"][0])


def first_half(rank, folder):
    """Two models, an optimizer with a schedule for each; saved after two steps."""
    accelerator, parts = two_models()
    average = Registered(parts[0])
    accelerator.register_for_checkpointing(average)
    train_two(accelerator, parts, 0, 2)
    accelerator.save_state(folder)
    with pytest.raises(ValueError, match="given shards, .* call full_tensor"):
        accelerator.save(average.state_dict(), f"{folder}/average")
    train_two(accelerator, parts, 2, STEPS)
    whole = [accelerator.get_state_dict(model) for model in parts[:2]]
    if rank:
        assert whole == [{}, {}]
    return whole


def second_half(rank, folder):
    accelerator, parts = two_models(3, 9.0, state_dict_type="LOCAL_STATE_DICT")
    average = Registered(parts[0])
    accelerator.register_for_checkpointing(average)
    accelerator.load_state(folder)
    assert accelerator.step == 2
    torch.manual_seed(7)
    assert torch.equal(average.value.full_tensor().cpu(), torch.nn.Linear(6, 8).weight.detach())
    again = os.path.join(folder, f"of-{accelerator.num_processes}")
    for number in (7, 1):  # an earlier run saved there more often
        accelerator.project_configuration.iteration = number
        accelerator.save_state(again)
    assert rank or os.listdir(os.path.join(again, "xla_fsdp")) == ["step-00000008.2"]
    assert "xla_fsdp" in os.listdir(again) and "model.safetensors" not in os.listdir(again)
    accelerator.load_state(again)
    train_two(accelerator, parts, 2, STEPS)
    assert [group["weight_decay"] for group in parts[2].param_groups] == [0.3, 0.0]
    return [accelerator.get_state_dict(model) for model in parts[:2]]


def two_models(seed=7, decay=0.3, **plugin):
    accelerator = accelerator_for(**plugin)
    torch.manual_seed(seed)
    models = [torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh()), torch.nn.Linear(8, 3)]
    optimizers = [
        optimizer_for(groups_of(models[0], decay)),
        torch.optim.SGD(models[1].parameters(), 0.1),
    ]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(one, halves) for one in optimizers]
    prepared = accelerator.prepare(*models, *optimizers)
    return accelerator, [*prepared, *accelerator.prepare(*schedulers)]


def train_two(accelerator, parts, start, stop):
    model, other, *optimizers, one, two = parts
    size = BATCH // accelerator.num_processes
    for step in range(start, stop):
        with accelerator.accumulate(model, other):
            data = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(step))
            part = data.split(size)[accelerator.process_index].to(accelerator.device)
            accelerator.backward(other(model(part)).square().mean())
            accelerator.clip_grad_norm_([*model.parameters(), *other.parameters()], CLIP)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        # Accelerate makes a step of the schedule for every rank: for one rate on all, by hand.
        one.scheduler.step()
        two.scheduler.step()


@pytest.mark.slow
def test_states_are_loaded_by_another_number_of_ranks(run_ranks, tmp_path):
    expected = run_ranks(first_half, 2, str(tmp_path), timeout=TIMEOUT)[0]
    files = {path.name for path in tmp_path.iterdir()}
    assert {"xla_fsdp", "model.safetensors", "model_1.safetensors"} <= files
    found = run_ranks(second_half, 1, str(tmp_path), timeout=TIMEOUT)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def besides(rank, variables):
    import torch_xla.core.xla_model as xm
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    import xla_fsdp.integrations.accelerate  # noqa: F401

    xm.rendezvous("before")
    os.environ.update(variables)
    xm.rendezvous("set")
    AcceleratorState._reset_state(True)
    accelerator = Accelerator()
    xm.rendezvous("made")
    for name in variables:
        os.environ.pop(name, None)
    assert accelerator.is_local_main_process == (rank == 0)
    loader = torch.utils.data.DataLoader(rows("bert", 13), batch_size=2, collate_fn=batch_of)
    model, loader = accelerator.prepare(build("bert").bfloat16(), loader)
    options = model.fsdp_options
    assert options.sync_module_states and options.compute_dtype is torch.bfloat16
    assert {p.dtype for p in model.parameters()} == {torch.float32}  # the shards
    assert len(model.fsdp_modules(model)) == 3
    model.eval()
    seen = []
    with torch.no_grad():
        for batch in loader:
            logits = model(**batch).logits
            assert logits.dtype is torch.float32
            seen.append(accelerator.gather_for_metrics((logits, batch["labels"])))
    logits, labels = (torch.cat(each).cpu() for each in zip(*seen, strict=True))
    assert torch.equal(labels, batch_of(rows("bert", 13))["labels"])
    inner = accelerator.unwrap_model(model)
    assert type(inner).__name__ == "BertForSequenceClassification"
    state = accelerator.get_state_dict(model)
    torch.testing.assert_close(accelerator.get_state_dict(inner), state, rtol=0, atol=0)
    return logits, state


@pytest.mark.slow
def test_evaluation_in_bfloat16(run_ranks, tmp_path):
    (tmp_path / "fsdp.yaml").write_text(YAML)
    variables = environment_of(read_config(str(tmp_path / "fsdp.yaml")))
    logits, state = run_ranks(besides, 2, variables, timeout=TIMEOUT)[0]
    model = build("bert").eval()
    model.load_state_dict(state)
    expected = model(**batch_of(rows("bert", 13))).logits
    torch.testing.assert_close(logits, expected.detach(), rtol=0.02, atol=0.02)  # bfloat16


def small():
    torch.manual_seed(3)
    parts = [torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)]
    return torch.nn.Sequential(*parts)


@on_each_rank(2, timeout=TIMEOUT)
def test_ignored_parameters_are_trained_alike_on_all_ranks(rank):
    accelerator = accelerator_for(ignored_modules="2")
    model, plain = small(), small()
    ours, theirs = (
        [torch.optim.SGD(one[part].parameters(), 0.5) for part in (0, 2)] for one in (model, plain)
    )
    model, *ours = accelerator.prepare(model, *ours)
    assert model[2].weight.shape == (2, 4)
    size = accelerator.num_processes
    for step, data in enumerate(torch.randn(3, size, 3, 4)):
        accelerator.backward(model(data[rank].to(accelerator.device)).square().mean())
        plain(data.flatten(0, 1)).square().mean().backward()
        if step == 1:
            norm = accelerator.clip_grad_norm_(model[2].parameters(), 0.1)
            expected = torch.nn.utils.clip_grad_norm_(plain[2].parameters(), 0.1)
            torch.testing.assert_close(norm.cpu(), expected, rtol=1e-4, atol=1e-6)
        if step == 2:
            accelerator.clip_grad_value_(model.parameters(), 0.02)
            torch.nn.utils.clip_grad_value_(plain.parameters(), 0.02)
        for optimizer in (*ours, *theirs):
            optimizer.step()
            optimizer.zero_grad()
    found = accelerator.get_state_dict(model)
    if rank == 0:
        torch.testing.assert_close(found, dict(plain.state_dict()), rtol=1e-4, atol=1e-5)
    whole = accelerator.unwrap_model(model)
    hook = whole.register_state_dict_post_hook(lambda module, state, prefix, local: state.clear())
    assert accelerator.get_state_dict(model) == {}
    part = accelerator.get_state_dict(whole[0])
    hook.remove()
    assert part.keys() == ({"weight", "bias"} if rank == 0 else set())
    assert all(torch.equal(part[name], found[f"0.{name}"]) for name in part)


@on_each_rank(2, timeout=TIMEOUT)
def test_torch_clips_the_shards_of_one_of_two_models(rank):
    accelerator = accelerator_for()
    model, plain, wide = small()[2], small()[2], torch.nn.Linear(6, 3)
    model, wide = accelerator.prepare(model, wide)
    parameters, data = list(model.parameters()), torch.randn(2, 3, 4)
    output = model(data[rank].to(accelerator.device)).square().mean()
    accelerator.backward(output + wide(torch.ones(6, device=accelerator.device)).sum())
    plain(data.flatten(0, 1)).square().mean().backward()
    norm = accelerator.clip_grad_norm_(iter(parameters), 0.1, 1)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, 1)
    torch.testing.assert_close(norm.cpu(), expected, rtol=1e-4, atol=1e-6)
    for shard, full in zip(parameters, plain.parameters(), strict=True):
        torch.testing.assert_close(shard.grad.full_tensor().cpu(), full.grad)
    assert wide.bias.grad.full_tensor().cpu().eq(1).all()
    with accelerator.no_sync(model):
        accelerator.backward(model(data[rank].to(accelerator.device)).sum())
    with pytest.raises(RuntimeError, match="stored by no_sync and not reduced yet"):
        accelerator.clip_grad_norm_(parameters, 0.1)


@on_each_rank(2, timeout=TIMEOUT)
def test_values_are_initialized_by_the_plugin_and_taken_from_the_first_rank(rank):
    def ones(module):
        module.to_empty(device="cpu", recurse=False)
        for parameter in module.parameters(recurse=False):
            torch.nn.init.constant_(parameter, 1.0 + rank)

    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "true"
    accelerator = accelerator_for(param_init_fn=ones, fsdp_version=2)
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"
    model = accelerator.prepare(model)
    assert model.fsdp_options.sync_module_states
    found = accelerator.get_state_dict(model)
    assert all(value.eq(1).all() for value in found.values()) and bool(found) == (rank == 0)


@on_each_rank(2, timeout=TIMEOUT)
def test_what_does_not_go_is_refused(rank):
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import (
        FullyShardedDataParallelPlugin,
        GradientAccumulationPlugin,
        TorchDynamoPlugin,
    )

    import xla_fsdp.integrations.accelerate  # noqa: F401  # its changes, if no test came before

    # Other ranks that read the environment while it is empty would not shard, and go on.
    if rank == 0:
        emptied = "accelerate.utils.environment.clear_environment"
        with mock.patch(emptied, side_effect=AssertionError):
            assert GradientAccumulationPlugin(num_steps=3).to_kwargs() == {"num_steps": 3}

    for given, message in (
        ({"ignored_modules": "transformer.("}, "must be a regular expression"),
        ({"ignored_modules": [3]}, "ignored_modules must be modules"),
        ({"auto_wrap_policy": 3}, "auto_wrap_policy must be TRANSFORMER_BASED_WRAP"),
        ({"mixed_precision": "fp16"}, "use 'bf16'"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            accelerator_for(**given)
    with pytest.raises(ValueError, match="dynamo_backend=INDUCTOR"):
        plugin = TorchDynamoPlugin(backend="inductor")
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(), dynamo_plugin=plugin)
    with pytest.raises(ValueError, match="parallelism_config is not supported"):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        Accelerator(fsdp_plugin=plugin, parallelism_config=ParallelismConfig(dp_shard_size=2))
    wrong = {"auto_wrap_policy": "transformer_based_wrap"}
    accelerator = accelerator_for(**wrong, transformer_cls_names_to_wrap=["GPT3Block"])
    with pytest.raises(ValueError, match="of class GPT3Block. Name some .*GPT2Block"):
        accelerator.prepare(build("gpt2"))
    accelerator = accelerator_for(activation_checkpointing=True)
    with pytest.raises(ValueError, match="name the layers"):
        accelerator.prepare(build("gpt2"))
    accelerator = accelerator_for()
    accelerator.dataloader_config.dispatch_batches = True
    with pytest.raises(ValueError, match="each rank reads its own batches"):
        accelerator.prepare(torch.utils.data.DataLoader([1, 2]))
    accelerator = accelerator_for()
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="has made steps before its model was sharded"):
        accelerator.prepare(model, optimizer)


@on_each_rank(2, timeout=TIMEOUT)
def test_without_the_import_the_first_step_is_refused(rank):
    import torch_xla
    import torch_xla.core.xla_model as xm
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    import xla_fsdp
    from xla_fsdp.integrations import accelerate as ours

    xm.rendezvous("before")
    ours.uninstall()
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # which an Accelerator sets that is given a plugin
    xm.rendezvous("undone")
    try:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        accelerator = Accelerator()
        model = xla_fsdp.XlaFullyShardedDataParallel(torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        x = torch.ones(2, 4, device=torch_xla.device())
        clip = lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0)  # noqa: E731
        for wrong in (optimizer.step, clip):
            accelerator.backward(model(x).sum())
            with pytest.raises(RuntimeError, match="import xla_fsdp.integrations.accelerate"):
                wrong()
        torch_xla.sync()
        xm.rendezvous("seen")
    finally:
        ours.install()


def test_a_config_file_is_what_the_plugin_reads(tmp_path, monkeypatch):
    from accelerate.utils import FullyShardedDataParallelPlugin

    from xla_fsdp.integrations.accelerate import sharding_of_plugin

    path = tmp_path / "fsdp.yaml"
    path.write_text(YAML)
    variables = environment_of(read_config(str(path)))
    assert variables["ACCELERATE_USE_FSDP"] == "true"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    sharding = sharding_of_plugin(FullyShardedDataParallelPlugin(), "bf16")
    options = sharding.options
    assert options["sharding_strategy"].name == "SHARD_GRAD_OP" and options["sync_module_states"]
    assert options["mixed_precision"].param_dtype is torch.bfloat16
    assert options["backward_prefetch"].name == "BACKWARD_PRE"
    assert sharding.layers == ["BertLayer"] and not sharding.full_state
    for before, after, message in (
        ("use_orig_params", "use_all_params", "options: fsdp_use_all_params. Supported are f"),
        ("sharding_strategy: 2", "sharding_strategy: 9", "fsdp_sharding_strategy: 9 must be one"),
        ("sharding_strategy: 2", "reshard_after_forward: true", "true needs fsdp_version: 2"),
        ("  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n", "", "cls_to_wrap has no effect wit"),
        ("prefetch: false", "prefetch: maybe", "fsdp_forward_prefetch: maybe must be true or f"),
        ("mixed_precision: bf16", "mixed_precision: fp16", "mixed_precision: fp16 is not s"),
        ("distributed_type: FSDP\n", "", "`distributed_type` must be specified"),
        ("main_training", "dynamo_backend: INDUCTOR\nmain_training", "dynamo_backend: INDUCTOR"),
        (YAML, "nothing", "is not a config file of Accelerate"),
    ):
        assert before in YAML
        path.write_text(YAML.replace(before, after))
        with pytest.raises(ValueError, match=message):
            environment_of(read_config(str(path)))
    for name, content in (
        ("fsdp.json", b"no"),
        ("latin.yaml", b"a: \xe9"),
        ("latin.json", b"\xe9"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} is not a config file of Accelerate"):
            read_config(str(tmp_path / name))
    with pytest.raises(FileNotFoundError, match="no config file .*none.yaml: pass another"):
        read_config(str(tmp_path / "none.yaml"))
    # Version 1 as this release of accelerate writes it; and what YAML makes of a bare no.
    for name in variables:
        monkeypatch.delenv(name)
    changed = YAML.replace("sharding_strategy: 2", "reshard_after_forward: NO_SHARD")
    changed = changed.replace("wrap: BertLayer", "wrap: [BertLayer, BertEmbeddings]")
    path.write_text(changed.replace("mixed_precision: bf16", "mixed_precision: no"))
    for name, value in environment_of(read_config(str(path))).items():
        monkeypatch.setenv(name, value)
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "no"
    sharding = sharding_of_plugin(FullyShardedDataParallelPlugin(), "no")
    assert sharding.options["sharding_strategy"].name == "NO_SHARD"
    assert sharding.layers == ["BertLayer", "BertEmbeddings"]


@pytest.mark.slow
def test_a_script_that_exits_ends_in_its_own_words(tmp_path, run_script):
    """test_hf_pairs.py trains with such a file."""
    (tmp_path / "fsdp.yaml").write_text(YAML)
    (tmp_path / "own.py").write_text("def main():\n    raise SystemExit('--wrong: flag')\n")
    run = "import sys\nfrom xla_fsdp.integrations.launch import main\nmain(sys.argv[1:])\n"
    done = run_script(run, "--config_file", tmp_path / "fsdp.yaml", tmp_path / "own.py")
    assert done.returncode == 1 and "--wrong: flag\n" in done.stderr
    assert "Traceback" not in done.stderr
