"""Steps of GPT, Llama, ResNet, U-Net and mixture-of-experts models at real sizes, bf16, as autograd would save them."""

from __future__ import annotations

from tests.planning.step_builder import StepBuilder

from memfit.graph.model_profile import ModelProfile, Replay

WIDTH = 2048
VOCABULARY = 32_000
NUM_TOKENS = 8 * 2048


def _linear(b: StepBuilder, module: str, x: int, tokens: int, width_in: int, width_out: int) -> int:
    """A linear layer under autocast: the fp32 weight is cast, and autograd saves the copy."""
    weight = b.parameter(f"{module}.weight", 4 * width_in * width_out)
    (cast,) = b.op(module, "_to_copy", [weight], 2 * width_in * width_out)
    flops = 2 * tokens * width_in * width_out
    return b.op(module, "mm", [x, cast], 2 * tokens * width_out, saves=[x, cast], flops=flops)[0]


def _layer_norm(b: StepBuilder, module: str, x: int, tokens: int, width: int) -> int:
    weight = b.parameter(f"{module}.weight", 4 * width)
    outputs = b.op(
        module,
        "native_layer_norm",
        [x, weight],
        [2 * tokens * width, 4 * tokens, 4 * tokens],
        saves=[x],
        saves_outputs=[1, 2],
    )
    return outputs[0]


def _attention(b: StepBuilder, module: str, q: int, k: int, v: int, tokens: int, width: int) -> int:
    qkv = list(dict.fromkeys([q, k, v]))
    flops = 4 * tokens * 2048 * width // 2
    sizes = [2 * tokens * width, 4 * tokens * 16]
    return b.op(module, "_flash_attention", qkv, sizes, saves=qkv, saves_outputs=[0, 1], flops=flops)[0]


def _head(b: StepBuilder, x: int, tokens: int, width: int) -> None:
    x = _layer_norm(b, "norm", x, tokens, width)
    logits = _linear(b, "lm_head", x, tokens, width, VOCABULARY)
    (fp32,) = b.op(None, "_to_copy", [logits], 4 * tokens * VOCABULARY)
    (log_probabilities,) = b.op(None, "_log_softmax", [fp32], 4 * tokens * VOCABULARY, saves_outputs=[0])
    b.op(None, "nll_loss_forward", [log_probabilities], 512, saves=[log_probabilities])


def gpt(num_blocks: int = 24, tokens: int = NUM_TOKENS, width: int = WIDTH) -> ModelProfile:
    b = StepBuilder()
    ids = b.batch(8 * tokens)
    table = b.parameter("embedding.weight", 4 * VOCABULARY * width)
    (x,) = b.op("embedding", "embedding", [ids, table], 2 * tokens * width)
    for number in range(num_blocks):
        path = b.block(f"blocks.{number}")
        y = _layer_norm(b, f"{path}.norm1", x, tokens, width)
        qkv = _linear(b, f"{path}.attention.qkv", y, tokens, width, 3 * width)
        y = _attention(b, f"{path}.attention", qkv, qkv, qkv, tokens, width)
        y = _linear(b, f"{path}.attention.out", y, tokens, width, width)
        (x,) = b.op(path, "add", [x, y], 2 * tokens * width)
        y = _layer_norm(b, f"{path}.norm2", x, tokens, width)
        y = _linear(b, f"{path}.mlp.up", y, tokens, width, 4 * width)
        (y,) = b.op(f"{path}.mlp", "gelu", [y], 8 * tokens * width, saves=[y])
        y = _linear(b, f"{path}.mlp.down", y, tokens, 4 * width, width)
        (x,) = b.op(path, "add", [x, y], 2 * tokens * width)
    _head(b, x, tokens, width)
    return b.finish(f"gpt-{num_blocks}")


def _rms_norm(b: StepBuilder, module: str, x: int, tokens: int, width: int) -> int:
    weight = b.parameter(f"{module}.weight", 2 * width)
    (fp32,) = b.op(module, "_to_copy", [x], 4 * tokens * width)
    (squares,) = b.op(module, "pow", [fp32], 4 * tokens * width, saves=[fp32])
    (mean,) = b.op(module, "mean", [squares], 4 * tokens)
    (variance,) = b.op(module, "add", [mean], 4 * tokens)
    (rsqrt,) = b.op(module, "rsqrt", [variance], 4 * tokens, saves_outputs=[0])
    (scaled,) = b.op(module, "mul", [fp32, rsqrt], 4 * tokens * width, saves=[fp32, rsqrt])
    (half,) = b.op(module, "_to_copy", [scaled], 2 * tokens * width)
    return b.op(module, "mul", [weight, half], 2 * tokens * width, saves=[half])[0]


def _rotary(b: StepBuilder, module: str, q: int, cos_sin: int, num_bytes: int) -> int:
    (straight,) = b.op(module, "mul", [q, cos_sin], num_bytes, saves=[cos_sin])
    (negated,) = b.op(module, "neg", [q], num_bytes // 2)
    (turned,) = b.op(module, "cat", [negated, q], num_bytes)
    (crossed,) = b.op(module, "mul", [turned, cos_sin], num_bytes, saves=[cos_sin])
    return b.op(module, "add", [straight, crossed], num_bytes)[0]


def llama(num_blocks: int = 32, tokens: int = NUM_TOKENS, width: int = WIDTH) -> ModelProfile:
    b = StepBuilder()
    ids = b.batch(8 * tokens)
    cos_sin = b.batch(4 * 2048 * 128)
    table = b.parameter("embedding.weight", 4 * VOCABULARY * width)
    (x,) = b.op("embedding", "embedding", [ids, table], 2 * tokens * width)
    hidden = 11 * width // 4
    for number in range(num_blocks):
        path = b.block(f"layers.{number}")
        attention = f"{path}.self_attn"
        y = _rms_norm(b, f"{path}.input_layernorm", x, tokens, width)
        q, k, v = (_linear(b, f"{attention}.{name}_proj", y, tokens, width, width) for name in "qkv")
        q = _rotary(b, attention, q, cos_sin, 2 * tokens * width)
        k = _rotary(b, attention, k, cos_sin, 2 * tokens * width)
        y = _attention(b, attention, q, k, v, tokens, width)
        y = _linear(b, f"{attention}.o_proj", y, tokens, width, width)
        (x,) = b.op(path, "add", [x, y], 2 * tokens * width)
        y = _rms_norm(b, f"{path}.post_attention_layernorm", x, tokens, width)
        gate = _linear(b, f"{path}.mlp.gate_proj", y, tokens, width, hidden)
        up = _linear(b, f"{path}.mlp.up_proj", y, tokens, width, hidden)
        (silu,) = b.op(f"{path}.mlp", "silu", [gate], 2 * tokens * hidden, saves=[gate])
        (y,) = b.op(f"{path}.mlp", "mul", [silu, up], 2 * tokens * hidden, saves=[silu, up])
        y = _linear(b, f"{path}.mlp.down_proj", y, tokens, hidden, width)
        (x,) = b.op(path, "add", [x, y], 2 * tokens * width)
    _head(b, x, tokens, width)
    return b.finish(f"llama-{num_blocks}")


def moe(num_blocks: int = 16, tokens: int = NUM_TOKENS, width: int = WIDTH, num_experts: int = 4) -> ModelProfile:
    b = StepBuilder()
    ids = b.batch(8 * tokens)
    table = b.parameter("embedding.weight", 4 * VOCABULARY * width)
    (x,) = b.op("embedding", "embedding", [ids, table], 2 * tokens * width)
    for number in range(num_blocks):
        path = b.block(f"layers.{number}")
        y = _layer_norm(b, f"{path}.norm1", x, tokens, width)
        qkv = _linear(b, f"{path}.attention.qkv", y, tokens, width, 3 * width)
        y = _attention(b, f"{path}.attention", qkv, qkv, qkv, tokens, width)
        y = _linear(b, f"{path}.attention.out", y, tokens, width, width)
        (x,) = b.op(path, "add", [x, y], 2 * tokens * width)
        y = _layer_norm(b, f"{path}.norm2", x, tokens, width)
        router = _linear(b, f"{path}.router", y, tokens, width, num_experts)
        (weights,) = b.op(f"{path}.router", "_softmax", [router], 4 * tokens * num_experts, saves_outputs=[0])
        (chosen,) = b.op(f"{path}.router", "nonzero", [weights], 8 * tokens, replay=Replay.STATEFUL)
        total = y
        for expert in range(num_experts):
            inner = f"{path}.experts.{expert}"
            share = tokens * (expert + 2) // (4 * num_experts)
            (part,) = b.op(inner, "index", [y, chosen], 2 * share * width, saves=[chosen])
            part = _linear(b, f"{inner}.up", part, share, width, 4 * width)
            (part,) = b.op(inner, "gelu", [part], 8 * share * width, saves=[part])
            part = _linear(b, f"{inner}.down", part, share, 4 * width, width)
            (part,) = b.op(inner, "mul", [part, weights], 2 * share * width, saves=[part, weights])
            (total,) = b.op(inner, "index_add", [total, part, chosen], 2 * tokens * width, saves=[chosen])
        (x,) = b.op(path, "add", [x, total], 2 * tokens * width)
    _head(b, x, tokens, width)
    return b.finish(f"moe-{num_blocks}")


def _convolution(
    b: StepBuilder, module: str, x: int, channels: tuple[int, int], pixels: int, kernel: int, *, relu: bool = True
) -> int:
    """Convolution, batch norm and, as torchvision has it, a ReLU in place."""
    weight = b.parameter(f"{module}.weight", 4 * channels[0] * channels[1] * kernel**2)
    flops = 2 * pixels * channels[0] * channels[1] * kernel**2
    size = 2 * pixels * channels[1]
    (y,) = b.op(f"{module}.conv", "convolution", [x, weight], size, saves=[x, weight], flops=flops)
    statistics = [4 * channels[1]] * 2
    y = b.op(f"{module}.norm", "cudnn_batch_norm", [y], [size, *statistics], saves=[y], saves_outputs=[1, 2])[0]
    return b.op(f"{module}.relu", "relu_", [y], in_place=True, saves_outputs=[0])[0] if relu else y


def resnet(batch: int = 256, depths: tuple[int, ...] = (3, 4, 6, 3)) -> ModelProfile:
    b = StepBuilder()
    pixels = batch * 112 * 112
    x = _convolution(b, "stem", b.batch(2 * batch * 3 * 224 * 224), (3, 64), pixels, 7)
    pixels //= 4
    (x,) = b.op("maxpool", "max_pool2d", [x], 2 * pixels * 64, saves=[x])
    channels = 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        for number in range(depth):
            path = b.block(f"layer{stage + 1}.{number}")
            before = pixels
            if stage and number == 0:
                pixels //= 4
            y = _convolution(b, f"{path}.1", x, (channels, width), before, 1)
            y = _convolution(b, f"{path}.2", y, (width, width), pixels, 3)
            y = _convolution(b, f"{path}.3", y, (width, 4 * width), pixels, 1, relu=False)
            if number == 0:
                x = _convolution(b, f"{path}.shortcut", x, (channels, 4 * width), pixels, 1, relu=False)
            (y,) = b.op(path, "add_", [y, x], in_place=True)
            (x,) = b.op(f"{path}.relu", "relu_", [y], in_place=True, saves_outputs=[0])
            channels = 4 * width
    (pooled,) = b.op("avgpool", "mean", [x], 2 * batch * channels)
    y = _linear(b, "fc", pooled, batch, channels, 1000)
    (y,) = b.op(None, "_log_softmax", [y], 4 * batch * 1000, saves_outputs=[0])
    b.op(None, "nll_loss_forward", [y], 512, saves=[y])
    return b.finish("resnet")


def unet(batch: int = 16, size: int = 256, width: int = 64, depth: int = 4) -> ModelProfile:
    b = StepBuilder()
    pixels, channels = batch * size * size, 3
    x = b.batch(2 * pixels * 3)
    skips = []

    def double(path: str, x: int, before: int, after: int) -> int:
        b.block(path)
        return _convolution(
            b, f"{path}.2", _convolution(b, f"{path}.1", x, (before, after), pixels, 3), (after, after), pixels, 3
        )

    for level in range(depth):
        x = double(f"down.{level}", x, channels, width * 2**level)
        channels = width * 2**level
        skips.append(x)
        pixels //= 4
        (x,) = b.op(f"pool.{level}", "max_pool2d", [x], 2 * pixels * channels, saves=[x])
    x = double("middle", x, channels, 2 * channels)
    for level in reversed(range(depth)):
        pixels *= 4
        (x,) = b.op(f"up.{level}", "upsample_bilinear2d", [x], 2 * pixels * 2 * channels)
        (x,) = b.op(f"up.{level}", "cat", [skips.pop(), x], 2 * pixels * 3 * channels)
        x = double(f"up.{level}.convs", x, 3 * channels, channels)
        channels //= 2
    weight = b.parameter("out.weight", 4 * width)
    (x,) = b.op("out", "convolution", [x, weight], 2 * pixels, saves=[x, weight], flops=2 * pixels * width)
    b.op(None, "mse_loss", [x], 512, saves=[x])
    return b.finish("unet")


def chain(num_layers: int = 1000, num_bytes: int = 2**20) -> ModelProfile:
    """Layers that each save what enters them, all alike."""
    b = StepBuilder()
    x = b.batch(num_bytes)
    for number in range(num_layers):
        path = b.block(f"layers.{number}")
        (x,) = b.op(path, "tanh", [x], num_bytes, saves_outputs=[0])
    b.op(None, "sum", [x], 512)
    return b.finish("chain")


FAMILIES = {"gpt": gpt, "llama": llama, "resnet": resnet, "unet": unet, "moe": moe}
