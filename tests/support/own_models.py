"""Modules with a forward of their own, as people and libraries write them, and data for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from axsparse.data.dataset import ArrayDataset

WIDTH, HEADS, CLASSES, WORDS = 16, 2, 5, 11


def images(samples: int = 16, size: int = 8) -> ArrayDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples, 3, size, size, generator=generator)
    return ArrayDataset(inputs, torch.randint(CLASSES, (samples,), generator=generator))


def noisy_images(samples: int = 16) -> ArrayDataset:
    """Images, times and classes; what is learnt is an image."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 3, 8, 8, generator=generator)
    t = torch.rand(samples, generator=generator) * 100
    y = torch.randint(CLASSES, (samples,), generator=generator)
    return ArrayDataset((x, t, y), torch.randn(x.shape, generator=generator))


def words(samples: int = 16, length: int = 6) -> ArrayDataset:
    tokens = torch.randint(WORDS, (samples, length), generator=torch.Generator().manual_seed(5))
    return ArrayDataset(tokens, tokens.roll(-1, 1))


def word_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def square_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.float() - targets).square().mean(dim=(1, 2, 3)).sum()


class Attention(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        x = x + self.attn(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, WIDTH, 4, 4)
        self.norm = nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.proj(x).flatten(2).transpose(1, 2))


class Vit(nn.Module):
    """As timm writes it: parameters beside the blocks, a pooled class token, layers of no use."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.1)
        self.pos_embed = nn.Parameter(torch.randn(1, 5, WIDTH) * 0.1)
        self.pos_drop = nn.Dropout(0.0)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.norm = nn.LayerNorm(WIDTH)
        self.fc_norm = nn.Identity()
        self.head_drop = nn.Dropout(0.0)
        self.head = nn.Linear(WIDTH, CLASSES)

    def embed(self, x: Tensor) -> Any:
        x = self.patch_embed(x)
        return torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed

    def forward_features(self, x: Tensor) -> Any:
        return self.norm(self.blocks(self.pos_drop(self.embed(x))))

    def forward_head(self, x: Tensor) -> Any:
        return self.head(self.head_drop(self.fc_norm(x[:, 0])))

    def forward(self, x: Tensor) -> Any:
        return self.forward_head(self.forward_features(x))


class Nested(Vit):
    """Stages of blocks as a list of lists, none of which has a forward."""

    def __init__(self) -> None:
        super().__init__()
        first, *others = self.blocks
        del self.blocks
        self.stages = nn.ModuleList([nn.ModuleList([first]), nn.ModuleList(others)])

    def forward_features(self, x: Tensor) -> Any:
        x = self.embed(x)
        for stage in self.stages:
            for block in stage.children():
                x = block(x)
        return self.norm(x)


class TimeEmbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, t: Tensor) -> Any:
        angles = t[:, None] * torch.exp(-torch.arange(4, device=t.device, dtype=t.dtype))
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1))


class DitBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attn = Attention()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 3 * WIDTH))

    def forward(self, x: Tensor, c: Tensor) -> Any:
        shift, scale, gate = self.adaLN_modulation(c).chunk(3, dim=1)
        normed = self.norm(x) * (1 + scale[:, None]) + shift[:, None]
        return x + gate[:, None] * self.attn(normed)


class FinalLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.linear = nn.Linear(WIDTH, 48)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor, c: Tensor) -> Any:
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(self.norm_final(x) * (1 + scale[:, None]) + shift[:, None])


class Dit(nn.Module):
    """A diffusion transformer: blocks and what is behind them are conditioned on time and class."""

    def __init__(self) -> None:
        super().__init__()
        self.x_embedder = PatchEmbed()
        self.t_embedder = TimeEmbed()
        self.y_embedder = nn.Embedding(CLASSES, WIDTH)
        self.register_buffer("pos_embed", torch.randn(1, 4, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(DitBlock() for _ in range(3))
        self.final_layer = FinalLayer()

    def unpatchify(self, x: Tensor) -> Tensor:
        x = x.reshape(x.shape[0], 2, 2, 4, 4, 3)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(x.shape[0], 3, 8, 8)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        x = self.x_embedder(x) + self.pos_embed
        c = self.t_embedder(t) + self.y_embedder(y)
        for block in self.blocks:
            x = block(x, c)
        return self.unpatchify(self.final_layer(x, c))


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Any:
        identity = x if self.downsample is None else self.downsample(x)
        x = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        x += identity
        return self.relu(x)


class ResNet(nn.Module):
    """As torchvision writes it: four stages, each a list."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = self._stage(8, 8, 1)
        self.layer2 = self._stage(8, 12, 2)
        self.layer3 = self._stage(12, 16, 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(16, CLASSES)

    def _stage(self, inputs: int, outputs: int, stride: int) -> nn.Sequential:
        return nn.Sequential(BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1))

    def forward(self, x: Tensor) -> Any:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Stages(nn.Module):
    """As ConvNeXt was published: two lists whose members take turns, and computing between."""

    def __init__(self) -> None:
        super().__init__()
        self.downsample_layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 2, 2), nn.GELU()) for a, b in ((3, 8), (8, 12))
        )
        self.stages = nn.ModuleList(nn.Sequential(nn.Conv2d(b, b, 3, 1, 1)) for b in (8, 12))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Any:
        for downsample, stage in zip(self.downsample_layers, self.stages, strict=True):
            x = downsample(x)
            x = stage(torch.tanh(x))
        return self.head(self.norm(x.mean([-2, -1])))


class Residual(nn.Sequential):
    """A list of parametrized members, with a forward and a parameter of its own."""

    def __init__(self) -> None:
        first = nn.Sequential(nn.Flatten(), nn.Linear(192, WIDTH))
        super().__init__(first, *(weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2)))
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = self
        x = torch.tanh(first(x))
        for block in rest:
            x = x + torch.relu(block(x))
        return x * self.scale


class Probe(nn.Module):
    """Blocks that run without gradients between a stem and blocks that train; a residual passes
    one of them by."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(192, WIDTH)
        self.backbone = nn.ModuleList(Block() for _ in range(2))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    @torch.no_grad()
    def encode(self, x: Tensor) -> Any:
        return self.backbone[0](x).tanh()

    def forward(self, x: Tensor) -> Any:
        first = self.stem(x.flatten(1)).unsqueeze(1)
        x = first + self.encode(first)
        with torch.inference_mode():
            taught = self.backbone[1](x)
        x = x + taught.clone()
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Gpt(nn.Module):
    """As nanoGPT writes it: a dictionary of modules, a mask, and one weight at both ends."""

    def __init__(self) -> None:
        super().__init__()
        blocks = nn.ModuleList(Block() for _ in range(3))
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(WORDS, WIDTH), "wpe": nn.Embedding(6, WIDTH), "h": blocks}
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]

    def forward(self, idx: Tensor) -> Any:
        parts: Any = self.transformer
        length = idx.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=idx.device).tril()
        x = parts.wte(idx) + parts.wpe(torch.arange(length, device=idx.device))
        for block in parts.h:
            x = block(x, mask=mask)
        return self.lm_head(self.norm(x))


class TorchEncoder(nn.Module):
    """torch's own encoder, whose layers get a mask that follows from the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Any:
        return self.out(self.encoder(self.embed(tokens), src_key_padding_mask=tokens == 0))


class Windows(nn.Module):
    """Blocks that are told the numbers of rows of the batch, as window attention is, and return
    them."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, size: tuple[int, int], scale: float = 1.0) -> Any:
            x = x.view(*size, -1)
            return (x + scale * torch.tanh(self.linear(x))).flatten(0, 1), size

    def __init__(self) -> None:
        super().__init__()
        self.embed = PatchEmbed()
        self.layers = nn.ModuleList(Windows.Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        size = tuple(x.shape[:2])
        x = x.flatten(0, 1)
        for layer in self.layers:
            x, size = layer(x, size, scale=0.5)
        return self.out(x.view(*size, -1).mean(1))


class Pooled(nn.Module):
    """Blocks that halve the number of patches, and are told it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, length: int) -> Any:
            return (x + self.linear(x) / length)[:, ::2]

    def __init__(self) -> None:
        super().__init__()
        self.embed = PatchEmbed()
        self.layers = nn.ModuleList(Pooled.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, x.shape[1])
        return x


class Mixture(nn.Module):
    """Blocks that send each word to two of four experts, with a balance of experts that is summed
    over the blocks, chances of another shape, and tensors made and filled without a device."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4, bias=False)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Tensor, balance: Tensor) -> Any:
            rows = self.norm(x).flatten(0, 1)
            chances = self.gate(rows).softmax(-1)
            weights, chosen = chances.topk(2, -1)
            result = torch.zeros_like(rows)
            for number, expert in enumerate(self.experts):
                row, choice = (chosen == number).nonzero(as_tuple=True)
                if len(row):
                    part = torch.tanh(expert(rows[row])) * weights[row, choice, None]
                    result = result.index_put((row,), part, accumulate=True)
            balance = balance + chances.square().view(len(x), -1).sum(-1)
            return x + result.view(x.shape), balance, chances

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Mixture.Block() for _ in range(3))
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, idx: Tensor) -> Any:
        x, balance = self.embed(idx) + torch.ones(WIDTH), torch.zeros(len(idx))
        before = torch.zeros(*idx.shape, WIDTH)
        before[:, 1:] = x[:, :-1]
        x = x + before
        for block in self.blocks:
            x, balance, chances = block(x, balance)
            x = x + chances.view(*idx.shape, -1).amax(-1, keepdim=True) * torch.ones(WIDTH)
        return self.out(x) * balance[:, None, None]


class Centred(Vit):
    """Shifts and scales its images in place."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.sub_(0.5).div_(2.0))


class Softened(Vit):
    """Makes the gradient behind its blocks smaller."""

    def forward_features(self, x: Tensor) -> Any:
        x = self.blocks(self.patch_embed(x) + self.pos_embed[:, 1:] + self.cls_token)
        if x.requires_grad:
            x.register_hook(lambda gradient: 0.1 * gradient)
        return self.norm(x)


# -- what is refused ------------------------------------------------------------------------


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.downs, self.ups = (nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            x = torch.relu(down(x))
            skips.append(x)
        for up in self.ups:
            x = up(x + skips.pop())
        return x


class Sums(nn.Module):
    """Each layer adds to a sum that all of them make together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(192, 192) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        total = torch.zeros_like(x)
        for layer in self.layers:
            x = layer(x)
            total = total + x
        return total


class Looped(nn.Module):
    """Blocks in an order of its own."""

    def __init__(self, order: Sequence[int]) -> None:
        super().__init__()
        self.stem = nn.Linear(192, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.order = nn.Linear(WIDTH, CLASSES), order

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x.flatten(1))
        for number in self.order:
            x = torch.tanh(self.blocks[number](x))
        return self.out(x)


class ByValue(Looped):
    """The mean of its images decides what it does."""

    def __init__(self) -> None:
        super().__init__(range(3))

    def forward(self, x: Tensor) -> Any:
        x = -x if x.mean() > 0 else x
        return super().forward(x)


class ByCount(Looped):
    """The number of its bright images decides what it does."""

    def __init__(self) -> None:
        super().__init__(range(3))

    def forward(self, x: Tensor) -> Any:
        total = torch.zeros(len(x))
        total += x.mean((1, 2, 3))
        return super().forward(x * len(total.nonzero()))


class Told(nn.Module):
    """Its blocks read what the forward writes into them."""

    class Block(nn.Module):
        shift: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            return self.linear(x) + self.shift

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(192, WIDTH)
        self.blocks = nn.ModuleList(Told.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.flatten(1))
        for block in self.blocks:
            block.shift = x.mean()
        for block in self.blocks:
            x = block(x)
        return x[:, :CLASSES]
