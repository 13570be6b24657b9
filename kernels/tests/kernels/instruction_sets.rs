//! Every instruction set gives the same bits as the portable code: for sizes that no vector
//! divides, for views that begin anywhere, for subnormal numbers, infinities and NaNs.
//!
//! A process reads `MEGATRON_SIMD` once, so the test runs this program again for each set.

use std::process::Command;

use crate::common::{bits, cast, ids, randn};
use candle_core::{DType, Device, Tensor};
use kernels::Isa;
use kernels::ops::attention::{AttentionDropout, HeadShape, RopeTable, attention, rope_inplace};
use kernels::ops::dropout::{Dropout, DropoutKey, Tokens, bias_dropout_add};
use kernels::ops::linear::bias_grad;
use kernels::ops::norm::{layer_norm, layer_norm_backward, rms_norm, rms_norm_backward};
use kernels::ops::optimizer::{AdamW, Sgd, adamw, sgd};
use kernels::ops::{activation, cross_entropy, embedding, reduce};

const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];
const S: usize = 23;
const B: usize = 3;

/// A view that begins three elements into its storage. Some elements are subnormal or 0; if `wild`,
/// others are not finite or at the ends of exp's range.
fn view(name: &str, shape: &[usize], dtype: DType, wild: bool) -> Tensor {
    const TAME: [f64; 4] = [1e-40, -6e-8, 0.0, -0.0];
    const WILD: [f64; 8] =
        [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 3e38, -3e38, 88.7, -87.4, 65_520.0];
    let n: usize = shape.iter().product();
    let mut values = crate::common::values(&randn(name, &[n + 3]));
    for (i, v) in values.iter_mut().enumerate() {
        *v = match (i % 53, wild) {
            (7, _) => TAME[i / 53 % TAME.len()],
            (19, true) => WILD[i / 53 % WILD.len()],
            _ => *v,
        };
    }
    let flat = cast(&Tensor::from_vec(values, n + 3, &Device::Cpu).unwrap(), dtype);
    flat.narrow(0, 3, n).unwrap().reshape(shape).unwrap()
}

/// FNV-1a of the bits of `results`. All NaNs count as one, because the compiler chooses which of
/// two operands' NaNs survives.
fn hash(results: &[Tensor]) -> u64 {
    let words = results
        .iter()
        .flat_map(bits)
        .map(|b| if f64::from_bits(b).is_nan() { u64::MAX } else { b });
    words.fold(0xCBF2_9CE4_8422_2325, |hash, word| (hash ^ word).wrapping_mul(0x0100_0000_01B3))
}

/// The weights that attention keeps, for 70 queries and keys. With equal scores and one-hot values,
/// component j of query q's output is not 0 if it keeps key j.
fn weights_kept(dropout: &AttentionDropout, dtype: DType) -> kernels::Result<Tensor> {
    let s = 70;
    let (b, shape) =
        (dropout.samples.len(), HeadShape { groups: 2, heads_per_group: 1, head_dim: s });
    let mut qkv = vec![0f32; s * b * shape.width()];
    for (position, row) in qkv.chunks_exact_mut(b * shape.width()).enumerate() {
        row.chunks_exact_mut(3 * s).for_each(|head| head[2 * s + position] = 1.0);
    }
    let qkv = Tensor::from_vec(qkv, (s, b, shape.width()), &Device::Cpu)?.to_dtype(dtype)?;
    Ok(attention(&qkv, shape, 1.0, Some(dropout))?.0.ne(0.0)?)
}

/// A line for each kernel and dtype: its name and the hash of its results.
fn digest() -> kernels::Result<Vec<String>> {
    let mut lines = Vec::new();
    for (dtype, wild) in DTYPES.iter().flat_map(|d| [(*d, false), (*d, true)]) {
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let mut line = |name: &str, results: &[Tensor]| {
            lines.push(format!("{name} {dtype:?} wild={wild}: {:x}", hash(results)));
        };
        let h = 2 * 67;
        let act = |name: &str| view(name, &[S, B, h], dtype, wild);
        let zeros = |shape: &[usize]| Tensor::zeros(shape, wide, &Device::Cpu).unwrap();
        let (x, dy, half) = (act("x"), act("dy"), view("half", &[S, B, h / 2], dtype, wild));
        line("gelu", &[activation::gelu(&x)?]);
        line("gelu_backward", &[activation::gelu_backward(&dy, &x)?]);
        line("swiglu", &[activation::swiglu(&x)?]);
        line("swiglu_backward", &[activation::swiglu_backward(&half, &x)?]);
        let (relu, squared) = (activation::relu(&x)?, activation::squared_relu(&x)?);
        line("relu", &[relu, activation::relu_backward(&dy, &x)?]);
        line("squared_relu", &[squared, activation::squared_relu_backward(&dy, &x)?]);

        let (w, bias) = (view("w", &[h], dtype, false), view("bias", &[h], dtype, wild));
        let (dw, db) = (zeros(&[h]), zeros(&[h]));
        let (y, stats) = layer_norm(&x, &w, &bias, 1e-5)?;
        let dx = layer_norm_backward(&dy, &x, &stats, &w, &dw, &db, Some(&act("residual")))?;
        line("layer_norm", &[y, dx, stats.mean.clone().unwrap(), stats.rstd, dw, db]);
        let dw = zeros(&[h]);
        let (y, stats) = rms_norm(&x, &w, 1e-5)?;
        line("rms_norm", &[y, rms_norm_backward(&dy, &x, &stats, &w, &dw, None)?, stats.rstd, dw]);

        // Rows that are rounded in several parts.
        let (x, w) =
            (view("long x", &[5, 1, 601], dtype, wild), view("long w", &[601], dtype, false));
        let (dw, db) = (zeros(&[601]), zeros(&[601]));
        let (y, stats) = layer_norm(&x, &w, &w, 1e-5)?;
        line(
            "long layer_norm",
            &[y, layer_norm_backward(&x, &x, &stats, &w, &dw, &db, None)?, dw, db],
        );
        let x = act("x");
        let db = zeros(&[h]);
        bias_grad(&x, &db)?;
        line("bias_grad", &[db]);

        let tokens =
            Tokens { samples: &[3, 1, 4], seq_offset: 5, seq_len: 100, step_and_samples: None };
        let dropout =
            Dropout { p: 0.3, key: DropoutKey { seed: 1, step: 2, layer: 3, site: 4 }, tokens };
        line(
            "bias_dropout_add",
            &[
                bias_dropout_add(&x, Some(&bias), Some(&dy), Some(&dropout))?,
                bias_dropout_add(&x, Some(&bias), Some(&dy), None)?,
                bias_dropout_add(&x, None, None, Some(&dropout))?,
            ],
        );

        let (rows, dtable) = (ids("tokens", &[S, B], 30), zeros(&[20, h]));
        embedding::embedding_backward(&dy, &rows, 4, &dtable)?;
        line(
            "embedding",
            &[embedding::embedding(&rows, &view("table", &[20, h], dtype, wild), 4)?, dtable],
        );

        let shape = HeadShape { groups: 1, heads_per_group: 3, head_dim: 26 };
        let qkv = view("qkv", &[S, B, shape.width()], dtype, wild);
        rope_inplace(&qkv, &RopeTable::new(S, 26, 1e4, dtype, &Device::Cpu)?, shape, 0, false)?;
        line("rope", &[qkv]);

        let samples = [3, 1 << 40, 4];
        let dropout = AttentionDropout {
            p: 0.3,
            key: DropoutKey { seed: 1, step: 2, layer: 3, site: 4 },
            samples: &samples,
            first_head: 7,
            step_and_samples: None,
        };
        line("attention's mask", &[weights_kept(&dropout, dtype)?]);

        let (targets, v) = (ids("targets", &[S * B], h as u32), h - 5);
        let logits = view("logits", &[S * B, h], dtype, wild);
        let (max, sums) = cross_entropy::row_statistics(&logits, &targets, 0, v)?;
        let (sum_exp, scale) = (sums.get(0)?, view("scale", &[S * B], wide, false));
        let (written, f32_logits) = (logits.zeros_like()?, view("logits", &[S * B, h], wide, wild));
        cross_entropy::cross_entropy_backward_into(
            &written,
            &f32_logits,
            &max,
            &sum_exp,
            &targets,
            &scale,
            0,
            v,
        )?;
        cross_entropy::cross_entropy_backward(&logits, &max, &sum_exp, &targets, &scale, 0, v)?;
        line("cross_entropy", &[max, sums, logits, written]);

        let flat = |name: &str, dtype| view(name, &[1003], dtype, wild);
        let (p, g, m, v) =
            (flat("p", wide), flat("g", wide), flat("m", wide), flat("v", wide).sqr()?);
        let weight = flat("weight", dtype);
        let rule = AdamW {
            lr: 0.1,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            step: 3,
            grad_scale: 0.5,
        };
        adamw(&p, Some(&weight), &g, &m, &v, &rule)?;
        line("adamw", &[p.copy()?, weight.copy()?, m.copy()?, v.copy()?]);
        if wide == DType::F32 {
            let (m, v) = (m.to_dtype(DType::BF16)?, v.to_dtype(DType::BF16)?);
            adamw(&p, Some(&weight), &g, &m, &v, &rule)?;
            line("adamw, moments in bf16", &[p.copy()?, m, v]);
        }
        sgd(
            &p,
            Some(&weight),
            &g,
            &m,
            &Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.1, grad_scale: 0.5 },
        )?;
        line("sgd", &[p, weight, m]);

        let (a, b) = (flat("a", dtype), flat("b", dtype));
        let squares = Tensor::new(reduce::sum_of_squares(&a)?, &Device::Cpu)?;
        reduce::add_inplace(&a, &b)?;
        reduce::scale_inplace(&b, 1.0 / 3.0)?;
        let casts: Vec<Tensor> = DTYPES.map(|to| flat("to", to)).into_iter().collect();
        casts.iter().try_for_each(|to| reduce::cast(to, &a))?;
        line("reduce", &[vec![squares, a, b], casts].concat());
    }
    Ok(lines)
}

/// Run by [`every_instruction_set_gives_the_bits_of_the_portable_code`].
#[test]
#[ignore = "run by another test, under MEGATRON_SIMD"]
fn print_digest() {
    for line in digest().unwrap() {
        println!("digest {line}");
    }
}

#[test]
fn every_instruction_set_gives_the_bits_of_the_portable_code() {
    let run = |isa: Isa| {
        let program = std::env::current_exe().unwrap();
        let args = ["--exact", "instruction_sets::print_digest", "--ignored", "--nocapture"];
        let output =
            Command::new(program).args(args).env("MEGATRON_SIMD", isa.name()).output().unwrap();
        assert!(output.status.success(), "{isa:?}: {}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        let lines: Vec<String> =
            text.lines().filter(|l| l.contains("digest ")).map(str::to_string).collect();
        assert!(lines.len() > 50, "{isa:?} printed {} lines", lines.len());
        lines
    };
    let portable = run(Isa::Portable);
    for isa in Isa::ALL.into_iter().filter(|isa| (Isa::Avx2..=Isa::supported()).contains(isa)) {
        for (want, got) in portable.iter().zip(run(isa)) {
            assert_eq!(*want, got, "{isa:?} differs from the portable code");
        }
    }
}
