"""Oracle of a DeepSeek-V4 target and its embedded DSpark stages: plain functional PyTorch, one sequence at a time.

Parameters use the published checkpoint's key names (`layers.N.attn.wq_a.weight` ...), so a dict of tensors is a model.
Nothing here aims at speed: every state is kept as a full history, so a ring buffer is just the last `window` rows.

`Cfg.prec`:
    fp32  everything fp32, no simulated quantisation (equals transformers in fp32)
    q32   fp32 activations with the simulated activation quantisers (isolates the quantisers)
    ref   bf16 activations, the simulated quantisers and the fp32 islands of the published inference code, with weights
          already dequantised to bf16
    q32+inputs, ref+inputs
          also the inputs of linear maps rounded to fp8, as that code does where a map's weights are fp8 or fp4
"""

import math
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F


@dataclass
class Cfg:
    vocab: int
    dim: int
    n_layers: int
    n_hash: int
    heads: int
    head_dim: int
    rope: int
    q_rank: int
    o_groups: int
    o_rank: int
    experts: int
    topk: int
    inter: int
    ratios: tuple  # one a layer, then one 0 a draft stage
    route_scale: float = 1.5
    limit: float = 10.0
    window: int = 128
    idx_heads: int = 64
    idx_dim: int = 128
    idx_topk: int = 512
    theta: float = 1e4
    ctheta: float = 1.6e5
    yarn_orig: int = 65536
    yarn_factor: float = 16.0
    beta_fast: int = 32
    beta_slow: int = 1
    hc: int = 4
    iters: int = 20
    hc_eps: float = 1e-6
    eps: float = 1e-6
    clamp_shared: bool = True  # False: the first published inference code
    block: int = 5
    noise: int = 128799
    targets: tuple = ()
    stages: int = 3
    rank: int = 256
    prec: str = "fp32"
    act_quant: bool = field(init=False)

    def __post_init__(self):
        self.act_quant = self.prec != "fp32"

    @property
    def adt(self):
        return torch.bfloat16 if self.prec.startswith("ref") else torch.float32


# Every top-k appends its smallest gap here: a golden with a near-tie would test the tie, not the model.
margins: list[float] = []


def note_margin(scores, k):
    """Appends the smallest gap between the last chosen and the first refused score, over the rows that refuse one."""
    if scores.shape[-1] > k:
        top = scores.topk(k + 1, -1).values
        gaps = (top[..., k - 1] - top[..., k])[top[..., k] > -math.inf]
        if gaps.numel():
            margins.append(gaps.min().item())


def rms(x, w, eps):
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if w is None else w.float() * y).to(x.dtype)


def pow2_ceil(s):  # smallest power of two >= s (bit trick in the kernels)
    m, e = torch.frexp(s)
    return torch.ldexp(torch.ones_like(s), torch.where(m == 0.5, e - 1, e))


def qdq_fp8(x, blk):  # 1 x blk groups, e4m3, UE8M0 scale, amax floor 1e-4
    y = x.float().unflatten(-1, (-1, blk))
    s = pow2_ceil(y.abs().amax(-1, keepdim=True).clamp_min(1e-4) * (1 / 448.0))
    return ((y / s).clamp(-448, 448).to(torch.float8_e4m3fn).float() * s).flatten(-2).to(x.dtype)


def linear(c, P, name, x):  # a linear map that is fp8 or fp4 in the published files; a last group may be smaller
    if c.prec.endswith("+inputs"):
        x = torch.cat([qdq_fp8(part, part.shape[-1]) for part in x.split(128, -1)], -1)
    return F.linear(x, P[name + ".weight"])


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_MID = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def round_e2m1(v):  # round-to-nearest-even on the e2m1 grid
    a = v.abs().contiguous()
    lo = torch.searchsorted(_MID, a, right=False)  # ties go down ...
    hi = torch.searchsorted(_MID, a, right=True)  # ... or up
    i = torch.where((lo != hi) & (lo % 2 == 1), hi, lo)  # ... to the even code
    return torch.copysign(_E2M1[i], v)


def qdq_fp4(x, blk=32):
    y = x.float().unflatten(-1, (-1, blk))
    s = pow2_ceil(y.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126) * (1 / 6.0))
    return (round_e2m1((y / s).clamp(-6, 6)) * s).flatten(-2).to(x.dtype)


def hadamard(x):  # orthonormal Walsh-Hadamard (Sylvester order), size power of two
    n, y = x.shape[-1], x.float()
    h = 1
    while h < n:
        y = y.unflatten(-1, (n // (2 * h), 2, h))
        y = torch.stack([y[..., 0, :] + y[..., 1, :], y[..., 0, :] - y[..., 1, :]], -2).flatten(-3)
        h *= 2
    return (y * n**-0.5).to(x.dtype)


def rope_freqs(c, compressed):
    d = c.rope
    base = c.ctheta if compressed else c.theta
    f = 1.0 / (base ** (torch.arange(0, d, 2, dtype=torch.float32) / d))
    if compressed and c.yarn_orig > 0:

        def dim_at(rotations):
            return d * math.log(c.yarn_orig / (rotations * 2 * math.pi)) / (2 * math.log(base))

        lo, hi = max(math.floor(dim_at(c.beta_fast)), 0), min(math.ceil(dim_at(c.beta_slow)), d - 1)
        ramp = ((torch.arange(d // 2, dtype=torch.float32) - lo) / ((hi - lo) or 1e-3)).clamp(0, 1)
        f = f / c.yarn_factor * ramp + f * (1 - ramp)
    return f


def rope(x, pos, f, sign=1.0):  # x [S, ..., D]; rotates adjacent pairs of the TRAILING 2*len(f) channels
    ang = pos.float()[:, None] * f
    cos, sin = ang.cos(), sign * ang.sin()
    while cos.dim() < x.dim():
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    n, t = x[..., : -2 * len(f)], x[..., -2 * len(f) :].float()
    a, b = t[..., 0::2], t[..., 1::2]
    t = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)
    return torch.cat([n, t], -1)


def hc_weights(c, P, pre, H):
    x = H.flatten(-2).float()
    m = F.linear(x, P[pre + "_fn"].float()) * torch.rsqrt(x.square().mean(-1, keepdim=True) + c.eps)
    n, sc, bs = c.hc, P[pre + "_scale"].float(), P[pre + "_base"].float()
    a = torch.sigmoid(m[:, :n] * sc[0] + bs[:n]) + c.hc_eps
    b = 2 * torch.sigmoid(m[:, n : 2 * n] * sc[1] + bs[n : 2 * n])
    C = (m[:, 2 * n :] * sc[2] + bs[2 * n :]).unflatten(-1, (n, n)).softmax(-1) + c.hc_eps
    C = C / (C.sum(-2, keepdim=True) + c.hc_eps)
    for _ in range(c.iters - 1):
        C = C / (C.sum(-1, keepdim=True) + c.hc_eps)
        C = C / (C.sum(-2, keepdim=True) + c.hc_eps)
    return a, b, C


def hc_sub(c, P, name, H, fn):  # one sublayer wrapped by mHC
    a, b, C = hc_weights(c, P, name, H)
    x = (a.unsqueeze(-1) * H.float()).sum(-2).to(H.dtype)
    y = fn(x)
    return (b.unsqueeze(-1) * y.unsqueeze(-2).float() + torch.einsum("sjk,sjd->skd", C, H.float())).to(H.dtype)


def hc_head(c, P, pre, H):
    x = H.flatten(-2).float()
    m = F.linear(x, P[pre + "hc_head_fn"].float()) * torch.rsqrt(x.square().mean(-1, keepdim=True) + c.eps)
    a = torch.sigmoid(m * P[pre + "hc_head_scale"].float() + P[pre + "hc_head_base"].float()) + c.hc_eps
    return (a.unsqueeze(-1) * H.float()).sum(-2).to(H.dtype)


def softmax_sink(c, q, kv, mask, sink):  # q [S,h,d], kv [T,d] (K == V), mask [S,T] bool, sink [h]
    s = torch.einsum("shd,td->sht", q.float(), kv.float()) * c.head_dim**-0.5
    s = s.masked_fill(~mask[:, None], -math.inf)
    mx = s.amax(-1, keepdim=True)
    e = (s - mx).exp()
    den = e.sum(-1, keepdim=True) + (sink.float()[None, :, None] - mx).exp()
    return (torch.einsum("sht,td->shd", e.to(c.adt).float(), kv.float()) / den).to(q.dtype)


def q_proj(c, P, p, x, pos, f):
    qr = rms(linear(c, P, p + "wq_a", x), P[p + "q_norm.weight"], c.eps)
    q = linear(c, P, p + "wq_b", qr).unflatten(-1, (c.heads, c.head_dim))
    # per-head unweighted RMS; the official code squares in the activation dtype
    q = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + c.eps)
    return qr, rope(q, pos, f)


def kv_proj(c, P, p, x, pos, f):
    kv = rope(rms(linear(c, P, p + "wkv", x), P[p + "kv_norm.weight"], c.eps), pos, f)
    if c.act_quant:
        kv = torch.cat([qdq_fp8(kv[:, : -c.rope], 64), kv[:, -c.rope :]], -1)
    return kv


def o_proj(c, P, p, o, pos, f):
    o = rope(o, pos, f, -1.0).flatten(-2).unflatten(-1, (c.o_groups, -1))
    w = P[p + "wo_a.weight"].unflatten(0, (c.o_groups, c.o_rank))
    return linear(c, P, p + "wo_b", torch.einsum("sgd,grd->sgr", o, w).flatten(-2))


def compress(c, P, p, x_hist, done, ratio, hd, f, index):
    """Entries [done, T//ratio) of a compressor. x_hist: the whole history of this layer's normed inputs (an engine
    keeps only the rows of the open group, for ratio 4 of the previous one too)."""
    n = x_hist.shape[0] // ratio
    if n <= done:
        return None
    wide = ratio == 4  # overlapping windows only for CSA
    xf = x_hist[: n * ratio].float()
    kv = F.linear(xf, P[p + "wkv.weight"].float()).unflatten(0, (n, ratio))
    sc = F.linear(xf, P[p + "wgate.weight"].float()).unflatten(0, (n, ratio)) + P[p + "ape"].float()
    if wide:  # first half of channels = "as previous group"
        pk, ps = torch.zeros_like(kv[..., :hd]), torch.full_like(sc[..., :hd], -math.inf)
        pk[1:], ps[1:] = kv[:-1, :, :hd], sc[:-1, :, :hd]
        kv, sc = torch.cat([pk, kv[..., hd:]], 1), torch.cat([ps, sc[..., hd:]], 1)
    e = (kv * sc.softmax(1)).sum(1)[done:].to(x_hist.dtype)
    e = rope(rms(e, P[p + "norm.weight"], c.eps), torch.arange(done, n) * ratio, f)
    if c.act_quant:
        e = qdq_fp4(hadamard(e)) if index else torch.cat([qdq_fp8(e[:, : -c.rope], 64), e[:, -c.rope :]], -1)
    return e


def attention(c, P, p, ratio, x, pos, st):
    f = rope_freqs(c, ratio > 0)
    qr, q = q_proj(c, P, p, x, pos, f)
    st["kv"] = torch.cat([st["kv"], kv_proj(c, P, p, x, pos, f)]) if "kv" in st else kv_proj(c, P, p, x, pos, f)
    T = st["kv"].shape[0]
    key = torch.arange(T)
    mask = (key[None] <= pos[:, None]) & (key[None] > pos[:, None] - c.window)
    kv = st["kv"]
    if ratio:
        st["x"] = torch.cat([st["x"], x]) if "x" in st else x
        for nm, sub, hd in (("c", "compressor.", c.head_dim), ("i", "indexer.compressor.", c.idx_dim)):
            if nm == "i" and ratio != 4:
                continue
            old = st.get(nm, x.new_zeros(0, hd))
            new = compress(c, P, p + sub, st["x"], old.shape[0], ratio, hd, f, nm == "i")
            st[nm] = old if new is None else torch.cat([old, new])
        n = st["c"].shape[0]
        vis = torch.arange(n)[None] < ((pos + 1) // ratio)[:, None]  # only finished groups
        if ratio == 4 and n:
            iq = linear(c, P, p + "indexer.wq_b", qr).unflatten(-1, (c.idx_heads, c.idx_dim))
            iq = rope(iq, pos, f)
            if c.act_quant:
                iq = qdq_fp4(hadamard(iq))
            w = F.linear(x, P[p + "indexer.weights_proj.weight"]) * (c.idx_dim**-0.5 * c.idx_heads**-0.5)
            s = torch.einsum("shd,td->sht", iq, st["i"]).relu() * w.unsqueeze(-1)
            s = s.sum(1).masked_fill(~vis, -math.inf)
            note_margin(s, c.idx_topk)
            sel = torch.zeros_like(vis).scatter_(1, s.topk(min(c.idx_topk, n), -1).indices, True)
            vis = vis & sel
        kv, mask = torch.cat([kv, st["c"]]), torch.cat([mask, vis], 1)
    o = softmax_sink(c, q, kv, mask, P[p + "attn_sink"])
    return o_proj(c, P, p, o, pos, f)


def swiglu(c, P, p, x, w=None, clamp=True):
    g, u = linear(c, P, p + "w1", x).float(), linear(c, P, p + "w3", x).float()
    if clamp and c.limit > 0:
        g, u = g.clamp(max=c.limit), u.clamp(-c.limit, c.limit)
    h = F.silu(g) * u
    if w is not None:
        h = w * h  # routing weight goes in BEFORE w2
    return linear(c, P, p + "w2", h.to(x.dtype))


def moe(c, P, p, x, ids):
    s = F.softplus(F.linear(x.float(), P[p + "gate.weight"].float())).sqrt()
    if p + "gate.tid2eid" in P:
        idx = P[p + "gate.tid2eid"][ids].long()
    else:
        biased = s + P[p + "gate.bias"].float()  # the bias selects, it does not weigh
        note_margin(biased, c.topk)
        idx = biased.topk(c.topk, -1).indices
    w = s.gather(1, idx)
    w = w / w.sum(-1, keepdim=True) * c.route_scale
    y = torch.zeros_like(x, dtype=torch.float32)
    for e in range(c.experts):
        r, k = torch.where(idx == e)
        if len(r):
            y[r] += swiglu(c, P, f"{p}experts.{e}.", x[r], w[r, k, None])
    y += swiglu(c, P, p + "shared_experts.", x, clamp=c.clamp_shared)
    return y.to(x.dtype)


def layer(c, P, p, H, attn_fn, ids):
    H = hc_sub(c, P, p + "hc_attn", H, lambda x: attn_fn(x=rms(x, P[p + "attn_norm.weight"], c.eps)))
    return hc_sub(c, P, p + "hc_ffn", H, lambda x: moe(c, P, p + "ffn.", rms(x, P[p + "ffn_norm.weight"], c.eps), ids))


def target_forward(c, P, ids, state):
    """ids [S] appended to `state` (a dict, {} at start). Returns fp32 logits [S, vocab] and the concatenated taps
    [S, len(targets) * dim] (None without taps)."""
    p0 = state.setdefault("len", 0)
    pos = torch.arange(p0, p0 + len(ids))
    H = P["embed.weight"][ids].to(c.adt).unsqueeze(1).repeat(1, c.hc, 1)
    main = []
    for i in range(c.n_layers):
        st = state.setdefault(i, {})
        attn = partial(attention, c, P, f"layers.{i}.attn.", c.ratios[i], pos=pos, st=st)
        H = layer(c, P, f"layers.{i}.", H, attn, ids)
        if i in c.targets:
            main.append(H.mean(1))  # AFTER the layer; plain mean over the hc copies
    state["len"] = p0 + len(ids)
    x = rms(hc_head(c, P, "", H), P["norm.weight"], c.eps)
    return F.linear(x.float(), P["head.weight"].float()), (torch.cat(main, -1) if main else None)


def draft_context(c, P, main, dstate):
    """Append target hidden rows (positions dstate['len'] ...) to every stage's context KV."""
    p0 = dstate.setdefault("len", 0)
    pos = torch.arange(p0, p0 + len(main))
    # The published code rounds in groups of 128; dims are multiples of that there, so no group spans two taps.
    if c.prec.endswith("+inputs"):
        main = qdq_fp8(main, min(c.dim, 128))
    mx = rms(F.linear(main, P["mtp.0.main_proj.weight"]), P["mtp.0.main_norm.weight"], c.eps)
    f = rope_freqs(c, False)  # draft stages: ratio 0 -> theta 1e4, no YaRN
    for s in range(c.stages):
        kv = kv_proj(c, P, f"mtp.{s}.attn.", mx, pos, f)
        dstate[s] = torch.cat([dstate[s], kv]) if s in dstate else kv
    dstate["len"] = p0 + len(main)


def draft_block(c, P, anchor, dstate, sample=lambda logits: logits.argmax(-1)):
    """anchor = last committed token (position dstate['len']); returns tokens [block], logits, confidence logits."""
    p0 = dstate["len"]
    pos = torch.arange(p0, p0 + c.block)
    f = rope_freqs(c, False)
    ids = torch.full((c.block,), c.noise)
    ids[0] = anchor
    H = P["embed.weight"][ids].to(c.adt).unsqueeze(1).repeat(1, c.hc, 1)

    def attn(s, x):
        p = f"mtp.{s}.attn."
        _, q = q_proj(c, P, p, x, pos, f)
        kv = torch.cat([dstate[s][-c.window :], kv_proj(c, P, p, x, pos, f)])  # the same keys for every query
        o = softmax_sink(c, q, kv, torch.ones(c.block, len(kv), dtype=torch.bool), P[p + "attn_sink"])
        return o_proj(c, P, p, o, pos, f)

    for s in range(c.stages):
        H = layer(c, P, f"mtp.{s}.", H, partial(attn, s), ids)
    p = f"mtp.{c.stages - 1}."
    h = hc_head(c, P, p, H)  # PRE-norm: this feeds the confidence head
    base = F.linear(rms(h, P[p + "norm.weight"], c.eps).float(), P["head.weight"].float())
    prev, toks, logits, conf = anchor, [], [], []
    for k in range(c.block):
        e = P[p + "markov_head.markov_w1.weight"][prev]
        row = base[k] + F.linear(e.float(), P[p + "markov_head.markov_w2.weight"].float())
        conf.append(F.linear(torch.cat([h[k], e.to(h.dtype)]).float(), P[p + "confidence_head.proj.weight"].float())[0])
        prev = int(sample(row))
        toks.append(prev)
        logits.append(row)
    return torch.tensor(toks), torch.stack(logits), torch.stack(conf)
