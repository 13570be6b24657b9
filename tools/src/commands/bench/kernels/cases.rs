//! The kernels to measure, with one method for each part of a model.

use candle_core::{DType, Tensor};
use kernels::ops::attention::{
    RopeTable, Rotation, attention, attention_backward, attention_backward_rotated,
    attention_cached, rope_inplace,
};
use kernels::ops::dropout::{Dropout, DropoutKey, Tokens, bias_dropout_add};
use kernels::ops::optimizer::{AdamW, adamw};
use kernels::ops::{activation, cross_entropy, embedding, linear, norm, reduce};
use megatron::Result;
use megatron::tensor_parallel::logits_room;

use super::{KernelBench, Shape, Work};

/// Most elements of the flat ranges that the optimizer is timed on; the time of a whole model is
/// extrapolated.
const FLAT: usize = 1 << 24;
/// Most elements of the buffer that stands for all gradients on a GPU.
const ALL_FLAT: usize = 1 << 28;

/// Tokens that a new token attends to, itself included.
const CACHED: usize = 4096;

impl KernelBench {
    pub fn linear_layers(&mut self) -> Result<()> {
        let Shape { layers, hidden: h, ffn, vocab, llama, .. } = self.shape;
        let up = if llama { 2 * ffn } else { ffn };
        let (calls, biased) = (layers as f64, !llama);
        type Make = fn(&KernelBench, usize) -> Result<Tensor>;
        // How x and dy are created.
        let (plain, activated): (Make, Make) = (KernelBench::activation, KernelBench::activated);
        let products = [
            ("qkv", h, self.heads().width(), [plain, plain]),
            ("attention output", h, h, [plain, plain]),
            ("mlp up", h, up, [plain, activated]),
            ("mlp down", ffn, h, [activated, plain]),
        ];
        for (what, k, n, [x, dy]) in products {
            let (x, w, dy) = (x(self, k)?, self.randn(&[n, k])?, dy(self, n)?);
            let dw = self.zeros(w.dims())?;
            let (rows, shape) = (self.rows(), format!("{}×{k}·{k}×{n}", self.rows()));
            let work = Work::Flops(2 * rows * k * n);
            // These results are added to the residual stream: by the product, unless ranks must be
            // summed first.
            let joined = n == h && what != "qkv";
            let alone = if joined { 0.0 } else { calls };
            self.time(&format!("linear, {what}"), shape.clone(), alone, work, || {
                linear::linear(&x, &w, None)
            })?;
            if joined {
                let (bias, residual, y) =
                    (self.randn(&[n])?, self.activation(n)?, self.activation(n)?);
                let bias = biased.then_some(&bias);
                self.time(
                    &format!("linear and residual, {what}"),
                    shape.clone(),
                    calls,
                    work,
                    || linear::linear_add_into(&x, &w, bias, &residual, &y),
                )?;
            }
            self.time(&format!("linear_dgrad, {what}"), shape.clone(), calls, work, || {
                linear::linear_dgrad(&dy, &w)
            })?;
            self.time(&format!("linear_wgrad, {what}"), shape, calls, work, || {
                linear::linear_wgrad(&dy, &x, &dw)
            })?;
            if biased {
                let db = self.zeros(n)?;
                let work = Work::Elements(rows * n);
                self.time(
                    &format!("bias_grad, {what}"),
                    format!("{rows}×{n}"),
                    calls,
                    work,
                    || linear::bias_grad(&dy, &db),
                )?;
            }
        }
        self.output_layer(h, vocab)
    }

    /// The products of the loss in chunks, as the head runs them.
    fn output_layer(&mut self, k: usize, n: usize) -> Result<()> {
        let (rows, width) = logits_room(n, DType::F32, &self.device);
        let rows = rows.min(self.rows());
        let apart = |t: Tensor| -> Result<Tensor> { Ok(t.narrow(1, 0, n)?) };
        let (x, w, dx) = (self.randn(&[rows, k])?, self.randn(&[n, k])?, self.randn(&[rows, k])?);
        let (logits, dlogits) =
            (apart(self.zeros((rows, width))?)?, apart(self.randn(&[rows, width])?)?);
        let dw = self.zeros(w.dims())?;
        let (shape, calls) = (format!("{rows}×{k}·{k}×{n}"), self.rows() as f64 / rows as f64);
        let work = Work::Flops(2 * rows * k * n);
        let name = |product| format!("{product}, logits");
        self.time(&name("linear"), shape.clone(), calls, work, || {
            linear::linear_into(&x, &w, None, &logits)
        })?;
        self.time(&name("linear_dgrad"), shape.clone(), calls, work, || {
            linear::linear_dgrad_into(&dlogits, &w, &dx)
        })?;
        self.time(&name("linear_wgrad"), shape, calls, work, || {
            linear::linear_wgrad(&dlogits, &x, &dw)
        })
    }

    pub fn attention(&mut self) -> Result<()> {
        let (heads, Shape { layers, seq, micro_batch, llama, .. }) = (self.heads(), self.shape);
        let scale = 1.0 / (heads.head_dim as f64).sqrt();
        let qkv = self.activation(heads.width())?;
        if !["attention", "attention_backward", "rope"].iter().any(|name| name.contains(&self.only))
        {
            return Ok(());
        }
        let (out, lse) = attention(&qkv, heads, scale, None)?;
        let shape = format!("{micro_batch}×{} heads×{seq}²×{}", heads.heads(), heads.head_dim);
        // The product of all queries with all keys; only the causal half counts.
        let product = micro_batch * heads.heads() * seq * seq * heads.head_dim;
        let calls = layers as f64;
        self.time("attention", shape.clone(), calls, Work::Flops(2 * product), || {
            attention(&qkv, heads, scale, None)
        })?;
        let work = Work::Flops(5 * product);
        let table = llama
            .then(|| RopeTable::new(seq, heads.head_dim, 1e4, self.dtype, &self.device))
            .transpose()?;
        let Some(table) = table else {
            return self.time("attention_backward", shape, calls, work, || {
                attention_backward(&out, &qkv, &out, &lse, heads, scale, None)
            });
        };
        // On a GPU, the kernel that produces gradients also rotates them back if it can; on a CPU a
        // separate kernel does, which is timed separately.
        let on_gpu = !self.device.is_cpu();
        self.time("attention_backward", shape, calls, work, || {
            let rotation = Rotation { table: &table, positions: None };
            if on_gpu {
                attention_backward_rotated([&out, &qkv, &out, &lse], heads, scale, None, &rotation)
            } else {
                attention_backward(&out, &qkv, &out, &lse, heads, scale, None)
            }
        })?;
        let rotated = qkv.elem_count() / (heads.heads_per_group + 2) * (heads.heads_per_group + 1);
        let shape = format!("{}×{}", self.rows(), heads.width());
        let times = if on_gpu { calls } else { 2.0 * calls };
        self.time("rope", shape, times, Work::Elements(2 * rotated), || {
            rope_inplace(&qkv, &table, heads, 0, false)
        })
    }

    pub fn elementwise(&mut self) -> Result<()> {
        let (rows, Shape { layers, hidden, ffn, llama, .. }) = (self.rows(), self.shape);
        let calls = layers as f64;
        let dy = self.activation(ffn)?;
        let n = rows * ffn;
        if llama {
            let (x, shape) = (self.activation(2 * ffn)?, format!("{rows}×2·{ffn}"));
            self.time("swiglu", shape.clone(), calls, Work::Elements(3 * n), || {
                activation::swiglu(&x)
            })?;
            self.time("swiglu_backward", shape, calls, Work::Elements(5 * n), || {
                activation::swiglu_backward(&dy, &x)
            })?;
        } else {
            let (x, shape) = (self.activation(ffn)?, format!("{rows}×{ffn}"));
            self.time("gelu", shape.clone(), calls, Work::Elements(2 * n), || {
                activation::gelu(&x)
            })?;
            self.time("gelu_backward", shape, calls, Work::Elements(3 * n), || {
                activation::gelu_backward(&dy, &x)
            })?;
        }
        let (x, residual, shape) =
            (self.activation(hidden)?, self.activation(hidden)?, format!("{rows}×{hidden}"));
        let bias = if llama { None } else { Some(self.randn(&[hidden])?) };
        let work = Work::Elements(3 * rows * hidden);
        // Presets train without dropout, and on one rank the products add the residual, so neither
        // kernel is called in a step.
        self.time("bias_dropout_add", shape.clone(), 0.0, work, || {
            bias_dropout_add(&x, bias.as_ref(), Some(&residual), None)
        })?;
        let samples: Vec<u64> = (0..self.shape.micro_batch as u64).collect();
        let tokens = Tokens {
            samples: &samples,
            seq_offset: 0,
            seq_len: self.shape.seq,
            step_and_samples: None,
        };
        let dropout =
            Dropout { p: 0.1, key: DropoutKey { seed: 1, step: 1, layer: 0, site: 0 }, tokens };
        self.time("bias_dropout_add, p = 0.1", shape, 0.0, work, || {
            bias_dropout_add(&x, bias.as_ref(), Some(&residual), Some(&dropout))
        })
    }

    pub fn norms(&mut self) -> Result<()> {
        let (rows, Shape { layers, hidden, llama, .. }) = (self.rows(), self.shape);
        let (x, dy, w, bias) = (
            self.activation(hidden)?,
            self.activation(hidden)?,
            self.randn(&[hidden])?,
            self.randn(&[hidden])?,
        );
        let (dw, db, residual) =
            (self.zeros(hidden)?, self.zeros(hidden)?, self.activation(hidden)?);
        let (calls, shape, n) =
            ((2 * layers + 1) as f64, format!("{rows}×{hidden}"), rows * hidden);
        let (forward, backward) = (Work::Elements(2 * n), Work::Elements(4 * n));
        if llama {
            let (_, stats) = norm::rms_norm(&x, &w, 1e-5)?;
            self.time("rms_norm", shape.clone(), calls, forward, || norm::rms_norm(&x, &w, 1e-5))?;
            self.time("rms_norm_backward", shape, calls, backward, || {
                norm::rms_norm_backward(&dy, &x, &stats, &w, &dw, Some(&residual))
            })
        } else {
            let (_, stats) = norm::layer_norm(&x, &w, &bias, 1e-5)?;
            self.time("layer_norm", shape.clone(), calls, forward, || {
                norm::layer_norm(&x, &w, &bias, 1e-5)
            })?;
            self.time("layer_norm_backward", shape, calls, backward, || {
                norm::layer_norm_backward(&dy, &x, &stats, &w, &dw, &db, Some(&residual))
            })
        }
    }

    pub fn vocabulary(&mut self) -> Result<()> {
        let (rows, Shape { hidden, vocab, seq, micro_batch, .. }) = (self.rows(), self.shape);
        // Multiples of a large odd number: ids in an order that defeats caches.
        let ids = (0..rows as u32).map(|i| i.wrapping_mul(2_654_435_761) % vocab as u32).collect();
        let ids = Tensor::from_vec(ids, (seq, micro_batch), &self.device)?;
        let (w, dy) = (self.randn(&[vocab, hidden])?, self.activation(hidden)?);
        let dw = self.zeros(w.dims())?;
        let (shape, n) = (format!("{rows}×{hidden}"), rows * hidden);
        self.time("embedding", shape.clone(), 1.0, Work::Elements(2 * n), || {
            embedding::embedding(&ids, &w, 0)
        })?;
        // Every token reads and writes one row of dweight in fp32.
        let work = Work::Elements(n + 2 * n * (4 / self.dtype.size_in_bytes()));
        self.time("embedding_backward", shape, 1.0, work, || {
            embedding::embedding_backward(&dy, &ids, 0, &dw)
        })?;
        let (shape, n) = (format!("{rows}×{vocab}"), rows * vocab);
        let (logits, dlogits) =
            (self.wide_randn(&[rows, vocab])?, self.activation(vocab)?.reshape((rows, vocab))?);
        let (max, _) = cross_entropy::row_statistics(&logits, &ids, 0, vocab)?;
        let ones = Tensor::ones(rows, DType::F32, &self.device)?;
        // A GPU computes both at once; they are separate only if the vocabulary is split over
        // ranks.
        let apart = if self.device.is_cpu() { 1.0 } else { 0.0 };
        self.time("row_statistics", shape.clone(), apart, Work::Fp32(n), || {
            cross_entropy::row_statistics(&logits, &ids, 0, vocab)
        })?;
        if self.dtype == DType::F32 {
            self.time("cross_entropy_backward", shape.clone(), apart, Work::Fp32(2 * n), || {
                cross_entropy::cross_entropy_backward(&logits, &max, &ones, &ids, &ones, 0, vocab)
            })?;
        } else {
            self.time(
                "cross_entropy_backward_into",
                shape.clone(),
                apart,
                Work::Elements(3 * n),
                || {
                    cross_entropy::cross_entropy_backward_into(
                        &dlogits, &logits, &max, &ones, &ids, &ones, 0, vocab,
                    )
                },
            )?;
        }
        if self.device.is_cpu() {
            return Ok(());
        }
        let (into, work) = match self.dtype {
            DType::F32 => (None, Work::Fp32(2 * n)),
            _ => (Some(&dlogits), Work::Elements(3 * n)),
        };
        self.time("cross_entropy_fused", shape, 1.0, work, || {
            cross_entropy::cross_entropy_fused(&logits, into, &ids, &ones, 0, vocab)
        })
    }

    pub fn optimizer(&mut self) -> Result<()> {
        let Shape { layers, hidden, ffn, vocab, llama, .. } = self.shape;
        let mlp = if llama { 3 * ffn } else { 2 * ffn };
        let params = layers * hidden * (self.heads().width() + hidden + mlp) + vocab * hidden;
        let n = params.min(FLAT);
        let g = self.wide_randn(&[n])?;
        let (m, v) = (g.zeros_like()?, g.zeros_like()?);
        // The low halves that extend bf16 weights to fp32 are stored separately.
        let p = if self.dtype == DType::BF16 {
            Tensor::zeros(n, DType::I16, g.device())?
        } else {
            self.wide_randn(&[n])?
        };
        let (calls, shape) = (params as f64 / n as f64, n.to_string());
        let rule = AdamW {
            lr: 3e-4,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
            step: 1,
            grad_scale: 1.0,
        };
        let weight = (self.dtype != DType::F32).then(|| self.randn(&[n])).transpose()?;
        if self.device.is_cpu() {
            self.time("sum_of_squares", shape.clone(), calls, Work::Fp32(n), || {
                reduce::sum_of_squares(&g)
            })?;
        } else {
            // As in a step: for all gradients at once, without waiting on the host.
            let copies = params.div_ceil(n).min(ALL_FLAT / n);
            let (all, count) = (Tensor::cat(&vec![&g; copies], 0)?, copies * n);
            let calls = params as f64 / count as f64;
            self.time("sum_of_squares", count.to_string(), calls, Work::Fp32(count), || {
                reduce::total_of_squares(&[&all], all.device())
            })?;
        }
        self.time("adamw", shape.clone(), calls, Work::Fp32(7 * n), || {
            adamw(&p, weight.as_ref(), &g, &m, &v, &rule)
        })?;
        let (m16, v16) = (m.to_dtype(DType::BF16)?, v.to_dtype(DType::BF16)?);
        self.time("adamw_moments_in_bf16", shape.clone(), 0.0, Work::Fp32(5 * n), || {
            adamw(&p, weight.as_ref(), &g, &m16, &v16, &rule)
        })?;
        self.time("zero", shape, calls, Work::Fp32(n), || reduce::zero(&g))
    }

    /// Attention of one token over the tokens before it, as in text generation; not part of a
    /// training step.
    pub fn generation(&mut self) -> Result<()> {
        let (heads, b) = (self.heads(), self.shape.micro_batch);
        let name = "attention_cached, a token";
        if !name.contains(&self.only) {
            return Ok(());
        }
        let pair = 2 * heads.groups * heads.head_dim;
        let (qkv, cache) = (self.randn(&[1, b, heads.width()])?, self.randn(&[CACHED, b, pair])?);
        let (starts, scale) = (vec![CACHED - 1; b], 1.0 / (heads.head_dim as f64).sqrt());
        let shape = format!("{b}×{} heads×{CACHED}×{}", heads.heads(), heads.head_dim);
        self.time(name, shape, 0.0, Work::Elements(CACHED * b * pair), || {
            attention_cached(&qkv, &cache, &starts, heads, scale)
        })
    }
}
