//! Time of every kernel at the shapes of a GPT-2-small layer (512 tokens × 4 samples, 768 wide),
//! f32.
//!
//! `cargo bench --bench kernels` on all threads; `RAYON_NUM_THREADS=1 cargo bench --bench kernels
//! -- linear` for one kernel on one.

use candle_core::{DType, Device, Tensor};
use criterion::{Criterion, Throughput};
use kernels::Result;
use kernels::ops::attention::{
    AttentionDropout, HeadShape, RopeTable, attention, attention_backward, rope_inplace,
};
use kernels::ops::dropout::{Dropout, DropoutKey, Tokens, bias_dropout_add, dropout_backward};
use kernels::ops::optimizer::{AdamW, Sgd, adamw, sgd};
use kernels::ops::{activation, cross_entropy, embedding, linear, norm, reduce};
use kernels::tensor::philox::fill_normal;

const S: usize = 512;
const B: usize = 4;
const H: usize = 768;
const VOCAB: usize = 8192;
const KEY: DropoutKey = DropoutKey { seed: 1, step: 1, layer: 0, site: 0 };
const SAMPLES: [u64; B] = [0, 1, 2, 3];

fn randn(shape: &[usize]) -> Result<Tensor> {
    let mut values = vec![0.0; shape.iter().product()];
    fill_normal(&mut values, 1, 1, 0, 1.0);
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}

fn ids(shape: (usize, usize)) -> Result<Tensor> {
    let n = (shape.0 * shape.1) as u32;
    let values: Vec<u32> = (0..n).map(|i| i.wrapping_mul(2_654_435_761) % VOCAB as u32).collect();
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}

/// Times `f`. `work` is its floating-point operations (`Elements`) or the bytes it moves.
fn time<R>(
    c: &mut Criterion,
    name: &str,
    work: Throughput,
    f: impl Fn() -> Result<R>,
) -> Result<()> {
    f()?; // report refused inputs, do not time them
    let mut group = c.benchmark_group("kernels");
    group.throughput(work).sample_size(10).bench_function(name, |bench| bench.iter(&f));
    group.finish();
    Ok(())
}

fn bytes(elements: usize) -> Throughput {
    Throughput::Bytes(4 * elements as u64)
}

fn linear_layers(c: &mut Criterion) -> Result<()> {
    let n = 4 * H;
    let (x, w, bias, dy) = (randn(&[S, B, H])?, randn(&[n, H])?, randn(&[n])?, randn(&[S, B, n])?);
    let (dw, db) = (w.zeros_like()?, bias.zeros_like()?);
    let flops = Throughput::Elements((2 * S * B * H * n) as u64);
    time(c, "linear", flops.clone(), || linear::linear(&x, &w, Some(&bias)))?;
    time(c, "linear_dgrad", flops.clone(), || linear::linear_dgrad(&dy, &w))?;
    time(c, "linear_wgrad", flops, || linear::linear_wgrad(&dy, &x, &dw))?;
    time(c, "bias_grad", bytes(S * B * n), || linear::bias_grad(&dy, &db))
}

fn norms(c: &mut Criterion) -> Result<()> {
    let (x, dy, w, bias) = (randn(&[S, B, H])?, randn(&[S, B, H])?, randn(&[H])?, randn(&[H])?);
    let (dw, db) = (w.zeros_like()?, w.zeros_like()?);
    let n = S * B * H;
    let (_, layer) = norm::layer_norm(&x, &w, &bias, 1e-5)?;
    let (_, rms) = norm::rms_norm(&x, &w, 1e-5)?;
    time(c, "layer_norm", bytes(2 * n), || norm::layer_norm(&x, &w, &bias, 1e-5))?;
    time(c, "layer_norm_backward", bytes(3 * n), || {
        norm::layer_norm_backward(&dy, &x, &layer, &w, &dw, &db, None)
    })?;
    time(c, "rms_norm", bytes(2 * n), || norm::rms_norm(&x, &w, 1e-5))?;
    time(c, "rms_norm_backward", bytes(3 * n), || {
        norm::rms_norm_backward(&dy, &x, &rms, &w, &dw, None)
    })
}

fn activations(c: &mut Criterion) -> Result<()> {
    let (x, half) = (randn(&[S, B, 4 * H])?, randn(&[S, B, 2 * H])?);
    let n = S * B * 4 * H;
    time(c, "gelu", bytes(2 * n), || activation::gelu(&x))?;
    time(c, "gelu_backward", bytes(3 * n), || activation::gelu_backward(&x, &x))?;
    time(c, "squared_relu", bytes(2 * n), || activation::squared_relu(&x))?;
    time(c, "squared_relu_backward", bytes(3 * n), || activation::squared_relu_backward(&x, &x))?;
    time(c, "swiglu", bytes(3 * n / 2), || activation::swiglu(&x))?;
    time(c, "swiglu_backward", bytes(5 * n / 2), || activation::swiglu_backward(&half, &x))?;
    let (x, bias) = (randn(&[S, B, H])?, randn(&[H])?);
    let dropout = Dropout {
        p: 0.1,
        key: KEY,
        tokens: Tokens { samples: &SAMPLES, seq_offset: 0, seq_len: S, step_and_samples: None },
    };
    let n = S * B * H;
    time(c, "bias_add", bytes(3 * n), || bias_dropout_add(&x, Some(&bias), Some(&x), None))?;
    time(c, "bias_dropout_add", bytes(3 * n), || {
        bias_dropout_add(&x, Some(&bias), Some(&x), Some(&dropout))
    })?;
    time(c, "dropout_backward", bytes(2 * n), || dropout_backward(&x, &dropout))
}

fn attentions(c: &mut Criterion) -> Result<()> {
    let shape = HeadShape { groups: 12, heads_per_group: 1, head_dim: 64 };
    let qkv = randn(&[S, B, shape.width()])?;
    let dropout = AttentionDropout {
        p: 0.1,
        key: KEY,
        samples: &SAMPLES,
        first_head: 0,
        step_and_samples: None,
    };
    let flops = |products: usize| {
        Throughput::Elements((products * B * shape.heads() * S * S * shape.head_dim) as u64)
    };
    let (out, lse) = attention(&qkv, shape, 0.125, None)?;
    time(c, "attention", flops(2), || attention(&qkv, shape, 0.125, None))?;
    time(c, "attention_dropout", flops(2), || attention(&qkv, shape, 0.125, Some(&dropout)))?;
    let backward = |dropout| attention_backward(&out, &qkv, &out, &lse, shape, 0.125, dropout);
    time(c, "attention_backward", flops(5), || backward(None))?;
    time(c, "attention_dropout_backward", flops(5), || backward(Some(&dropout)))?;
    let table = RopeTable::new(S, shape.head_dim, 1e4, DType::F32, &Device::Cpu)?;
    time(c, "rope", bytes(2 * qkv.elem_count()), || rope_inplace(&qkv, &table, shape, 0, false))
}

fn vocabulary(c: &mut Criterion) -> Result<()> {
    let (ids, w, dy) = (ids((S, B))?, randn(&[VOCAB, H])?, randn(&[S, B, H])?);
    let dw = w.zeros_like()?;
    time(c, "embedding", bytes(2 * S * B * H), || embedding::embedding(&ids, &w, 0))?;
    time(c, "embedding_backward", bytes(3 * S * B * H), || {
        embedding::embedding_backward(&dy, &ids, 0, &dw)
    })?;
    let (logits, ones) = (randn(&[S, B, VOCAB])?, randn(&[S * B])?.ones_like()?);
    let n = logits.elem_count();
    let (max, _) = cross_entropy::row_statistics(&logits, &ids, 0, VOCAB)?;
    time(c, "row_statistics", bytes(n), || cross_entropy::row_statistics(&logits, &ids, 0, VOCAB))?;
    time(c, "cross_entropy_backward", bytes(2 * n), || {
        cross_entropy::cross_entropy_backward(&logits, &max, &ones, &ids, &ones, 0, VOCAB)
    })
}

fn optimizers(c: &mut Criterion) -> Result<()> {
    let n = 1 << 22;
    let (p, g, m) = (randn(&[n])?, randn(&[n])?, randn(&[n])?.zeros_like()?);
    let v = m.zeros_like()?;
    let (adam_rule, sgd_rule) = (
        AdamW {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            step: 1,
            grad_scale: 1.0,
        },
        Sgd { lr: 1e-3, momentum: 0.9, weight_decay: 0.1, grad_scale: 1.0 },
    );
    time(c, "adamw", bytes(7 * n), || adamw(&p, None, &g, &m, &v, &adam_rule))?;
    time(c, "sgd", bytes(5 * n), || sgd(&p, None, &g, &m, &sgd_rule))?;
    time(c, "sum_of_squares", bytes(n), || reduce::sum_of_squares(&g))?;
    time(c, "add_inplace", bytes(3 * n), || reduce::add_inplace(&p, &g))?;
    time(c, "scale_inplace", bytes(2 * n), || reduce::scale_inplace(&g, 1.0))?;
    time(c, "zero", bytes(n), || reduce::zero(&m))?;
    time(c, "fill_normal", bytes(n / 4), || randn(&[n / 4]))
}

fn main() -> Result<()> {
    let mut c = Criterion::default().configure_from_args();
    for group in [linear_layers, norms, activations, attentions, vocabulary, optimizers] {
        group(&mut c)?;
    }
    c.final_summary();
    Ok(())
}
