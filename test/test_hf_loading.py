"""Folders of the hub into models that are never whole, and experts in static shapes."""

import hf_models
import pytest
import torch


def loaded(rank, folder):
    from functools import partial

    from xla_fsdp import defer_init, full_state_dict
    from xla_fsdp.consolidate.errors import ModelMismatchError
    from xla_fsdp.integrations.pretrained import load_pretrained

    found = {}
    for kind in ("llama", "t5", "base"):
        name = "gpt2" if kind == "base" else kind
        wrap = partial(hf_models.wrap, name=name, param_init_fn=defer_init)
        cls = type(hf_models.build(name, hf_models.WIDE))
        model = load_pretrained(cls, f"{folder}/{kind}", wrap)
        found[kind] = full_state_dict(model)
        if kind == "llama":
            scores = model(hf_models.tokens().to(model.device)).logits.cpu()
    with pytest.raises(ModelMismatchError, match="lacks"):
        load_pretrained(type(hf_models.build("gpt2", hf_models.WIDE)), f"{folder}/flawed", wrap)
    with pytest.raises(TypeError, match="must be a model of transformers"):
        load_pretrained(torch.nn.Linear, folder, wrap)
    return found, scores


def test_folder_into_a_model_without_values(run_ranks, tmp_path):
    for name in ("llama", "t5"):
        hf_models.build(name, hf_models.WIDE).save_pretrained(tmp_path / name)
    gpt2 = hf_models.build("gpt2", hf_models.WIDE)
    gpt2.transformer.save_pretrained(tmp_path / "base")
    state = gpt2.state_dict()
    del state["transformer.wpe.weight"]
    gpt2.save_pretrained(tmp_path / "flawed", state_dict=state)
    (found, scores), _ = run_ranks(loaded, 2, str(tmp_path))
    for kind, state in found.items():
        expected = hf_models.build({"base": "gpt2"}.get(kind, kind), hf_models.WIDE).state_dict()
        torch.testing.assert_close(state, dict(expected), rtol=0, atol=0)
    plain = hf_models.build("llama", hf_models.WIDE)(hf_models.tokens()).logits
    torch.testing.assert_close(scores, plain)


def experts(rank, name):
    import torch_xla
    import torch_xla.core.xla_model as xm

    from xla_fsdp import compilation_counts, full_state_dict
    from xla_fsdp.integrations.experts import use_static_experts

    ids = [hf_models.tokens(number).chunk(2)[rank].to(torch_xla.device()) for number in range(3)]
    model = hf_models.wrap(hf_models.build(name, SPREAD).train(), name)
    if not BY_DEFAULT:
        names = [each.rpartition(".")[0] for each in use_static_experts(model)]
        assert names == [f"model.layers.{number}" for number in range(2)]
    counts = []

    def step():
        torch_xla.sync()
        xm.rendezvous("stepped")
        counts.append(sum(compilation_counts()))
        xm.rendezvous("counted")

    losses = hf_models.sgd_losses(model, ids.__getitem__, step)
    assert counts[1] == counts[2]  # the same program whatever the router does
    return losses, full_state_dict(model, rank0_only=False)


BY_DEFAULT = hf_models.VERSION >= 5
MORE = ["qwen3_moe", "deepseek_v3"] + ["gpt_oss"] * BY_DEFAULT
SPREAD = hf_models.SPREAD


@pytest.mark.parametrize(
    "name", ["mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_experts_in_static_shapes(run_ranks, name):
    from xla_fsdp.integrations.experts import use_static_experts

    assert use_static_experts(hf_models.build("gpt2", hf_models.WIDE)) == []
    plain = hf_models.build(name, SPREAD).train()
    expected = hf_models.sgd_losses(plain, hf_models.tokens)
    (first, state), (second, _) = run_ranks(experts, 2, name)
    for one, other, loss in zip(first, second, expected, strict=True):
        assert (one + other) / 2 == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-4, atol=1e-5)


SIZES = dict(hidden_size=8, intermediate_size=12, moe_intermediate_size=6, n_routed_experts=4)
SIZES |= dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1)
SIZES |= dict(shared_expert_intermediate_size=10, d_model=8, d_ff=12, expert_capacity=3)


@pytest.mark.parametrize(
    "kind",
    [
        ("olmoe", "OlmoeSparseMoeBlock", "OlmoeConfig", {"norm_topk_prob": True}),
        ("qwen2_moe", "Qwen2MoeSparseMoeBlock", "Qwen2MoeConfig", {}),
        ("deepseek_v3", "DeepseekV3MoE", "DeepseekV3Config", {}),
        ("switch_transformers", "SwitchTransformersSparseMLP", "SwitchTransformersConfig", {}),
    ],
    ids=lambda kind: kind[0],
)
def test_experts_of_other_models(kind):
    """Outputs and gradients of a block are those of the library, which are compared on the CPU."""
    from importlib import import_module

    from xla_fsdp.integrations.experts import use_static_experts, warn_of_dynamic_experts

    folder, name, config, more = kind
    library = import_module(f"transformers.models.{folder}.modeling_{folder}")
    torch.manual_seed(2)
    given = getattr(library, config)(**SIZES, dropout_rate=0.0, router_jitter_noise=0.0, **more)
    block = getattr(library, name)(given).train()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    hidden = torch.randn(2, 5, 8)
    outputs, gradients = [], []
    warn_of_dynamic_experts(block)
    for static in (False, True):
        if static:
            assert use_static_experts(torch.nn.ModuleList([block])) == ["0"]
            out = block(hidden)
        else:
            with pytest.warns(UserWarning, match=f"experts of {name} select their tokens"):
                out = block(hidden)
        outputs.append(out[0] if isinstance(out, tuple) else out)
        block.zero_grad()
        outputs[-1].square().sum().backward()
        gradients.append({n: p.grad for n, p in block.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_experts_that_are_not_known_are_refused():
    from xla_fsdp.integrations.experts import use_static_experts

    block = type("OwnMoe", (torch.nn.Module,), {"__module__": "transformers.models.own"})()
    block.experts = torch.nn.ModuleList()
    with pytest.raises(ValueError, match="0 is a OwnMoe, whose experts are not supported"):
        use_static_experts(torch.nn.ModuleList([block]))
