//! One rank's parameters in flat buckets: weights, their fp32 master weights, main gradients, and
//! the views that layers use.
//!
//! Buckets follow Megatron's distributed data parallel: parameters are in reverse order of the
//! layers, so that a bucket is complete early in backward. Each bucket has one candle storage for
//! weights and one for fp32 main gradients. Candle locks a storage, so work on one bucket never
//! waits for another bucket.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor};
use kernels::tensor::device::{computes_ahead, zeros};

use super::gradients::{GradientBuffer, Stale};
use super::row_sums::RowSums;
use super::{ParamSpec, Piece, initial_values};
use crate::Result;

/// Index of a parameter in its rank's [`ParamStore`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(usize);

/// The role of a local parameter in its tie group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The counted instance: only this one enters the norm and checkpoints.
    Primary,
    /// A copy of a weight whose primary lives on another pipeline stage. Summing the gradients
    /// keeps both equal.
    TiedCopy,
    /// A second use of a weight of this rank. It shares the storage of the weight. On a CPU it also
    /// shares the gradient, to which the sums of the first use are added once; on a GPU it has its
    /// own gradient.
    TiedUse(ParamId),
}

/// One local parameter.
#[derive(Debug)]
pub struct Param {
    /// The layout-independent description.
    pub spec: ParamSpec,
    /// Whether it is the primary, a copy or a second use of a weight.
    pub role: Role,
    /// Where the local elements lie in the logical tensor.
    pub pieces: Vec<Piece>,
    /// Index of the bucket that holds it.
    pub bucket: usize,
    /// First element in the bucket.
    pub offset: usize,
    /// Elements of this rank's share, padding included.
    pub numel: usize,
    /// View of the bucket's weights, in local shape.
    pub weight: Tensor,
    /// Whether the main gradient holds nothing of this step yet.
    pub(super) stale: Arc<Stale>,
    /// The gradient of the first of two uses, if the bucket holds that of the second.
    pub(super) first_use: Option<Mutex<RowSums>>,
    /// The gradient of the second of two uses, in local shape, if the bucket holds that of the
    /// first.
    pub(super) second_use: Option<Tensor>,
}

impl Param {
    /// The elements of the bucket that this parameter takes.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.numel
    }
}

/// A contiguous range of parameters that is reduced and updated as one.
#[derive(Debug)]
pub struct Bucket {
    /// Parameters in it, in buffer order.
    pub params: Vec<ParamId>,
    /// Number of elements, padding included; divisible by dp.
    pub len: usize,
    /// `[len]` in model dtype.
    pub weights: Tensor,
    /// `[len]`, fp32 (f64 for f64 models).
    pub grads: GradientBuffer,
    /// The master weights, where weights are 16-bit and this rank updates part of the bucket.
    pub master: Option<Master>,
    /// Whether it holds a tied weight. Such a bucket is complete only when all uses have been
    /// added.
    pub tied: bool,
}

/// The fp32 master weights of 16-bit weights.
#[derive(Debug)]
pub struct Master {
    /// The elements of the bucket that this rank updates.
    pub range: Range<usize>,
    /// `[range.len()]`. For fp16 weights, the fp32 values. For bf16 weights, only the low halves
    /// (i16), because the weights are the high halves ([`kernels::ops::remainders`]).
    pub values: Tensor,
}

impl Master {
    /// The stored values of the elements `part` of the bucket.
    ///
    /// # Errors
    /// If `part` exceeds `range`.
    pub fn narrow(&self, part: &Range<usize>) -> candle_core::Result<Tensor> {
        self.values.narrow(0, part.start - self.range.start, part.len())
    }

    /// Splits the elements `whole` of the bucket, in order, into parts inside the range (true) and
    /// outside of it (false). No part is empty.
    pub fn parts(&self, whole: Range<usize>) -> impl Iterator<Item = (Range<usize>, bool)> {
        let kept = overlap(whole.clone(), &self.range);
        let parts =
            [(whole.start..kept.start, false), (kept.clone(), true), (kept.end..whole.end, false)];
        parts.into_iter().filter(|(part, _)| !part.is_empty())
    }
}

/// Where one rank's parameters lie in its buckets. All ranks of a pipeline stage have the same
/// placement.
#[derive(Clone, Debug)]
pub struct Placement {
    /// Parameters in forward order.
    pub params: Vec<PlacedParam>,
    /// Buckets in the order in which backward completes them.
    pub buckets: Vec<PlacedBucket>,
}

/// A parameter's place in a bucket.
#[derive(Clone, Debug)]
pub struct PlacedParam {
    /// The layout-independent description.
    pub spec: ParamSpec,
    /// Whether it is the primary, a copy or a second use of a weight.
    pub role: Role,
    /// Index of the bucket that holds it; for [`Role::TiedUse`], the primary's.
    pub bucket: usize,
    /// First element in the bucket; for [`Role::TiedUse`], the primary's.
    pub offset: usize,
    /// Elements of one rank's share, padding included.
    pub numel: usize,
}

/// A bucket without its memory; see [`Bucket`].
#[derive(Clone, Debug)]
pub struct PlacedBucket {
    /// As [`Bucket::params`].
    pub params: Vec<ParamId>,
    /// As [`Bucket::len`].
    pub len: usize,
    /// As [`Bucket::tied`].
    pub tied: bool,
}

/// How buckets are laid out.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Dtype of the weights; for gradients see [`Self::main_grad_dtype`].
    pub dtype: DType,
    /// Device of the buckets.
    pub device: Device,
    /// A bucket is closed once it has this many elements.
    pub bucket_size: usize,
    /// Number of ranks that a bucket is sharded over.
    pub dp: usize,
    /// Number of ranks that share each layer.
    pub tp: usize,
    /// This rank's index among the `tp` ranks, from 0.
    pub tp_rank: usize,
}

impl StoreOptions {
    /// Dtype of main gradients: fp32, or f64 for f64 models.
    pub fn main_grad_dtype(&self) -> DType {
        if self.dtype == DType::F64 { DType::F64 } else { DType::F32 }
    }
}

/// Collects the parameters of the layers of one rank in forward order.
#[derive(Debug, Default)]
pub struct ParamsBuilder {
    declared: Vec<(ParamSpec, Role, usize)>,
    chunk: usize,
}

/// Every parameter starts at a multiple of this many elements. This keeps SIMD and NCCL ranges
/// aligned (Megatron uses the same value).
const ALIGN: usize = 64;

impl ParamsBuilder {
    /// Starts the next chunk, to which later declarations belong. A bucket never spans chunks.
    pub fn next_chunk(&mut self) {
        self.chunk += 1;
    }

    /// Declares a parameter that this rank holds.
    pub fn declare(&mut self, spec: ParamSpec) -> ParamId {
        self.push(spec, Role::Primary)
    }

    /// Declares a further use of a tied weight. If the first use is on this rank, both share the
    /// storage. Otherwise this rank keeps a copy.
    pub fn declare_tied(&mut self, spec: ParamSpec) -> ParamId {
        let primary = self
            .declared
            .iter()
            .position(|(s, role, _)| s.name == spec.name && *role == Role::Primary);
        let role = primary.map_or(Role::TiedCopy, |at| Role::TiedUse(ParamId(at)));
        self.push(spec, role)
    }

    fn push(&mut self, spec: ParamSpec, role: Role) -> ParamId {
        self.declared.push((spec, role, self.chunk));
        ParamId(self.declared.len() - 1)
    }

    /// The parameters declared so far, in forward order, without second uses of tied weights.
    pub fn specs(&self) -> impl Iterator<Item = &ParamSpec> {
        self.declared
            .iter()
            .filter(|(_, role, _)| !matches!(role, Role::TiedUse(_)))
            .map(|(spec, ..)| spec)
    }

    /// Places the parameters declared so far in buckets; allocates nothing. A bucket is closed once
    /// it has `bucket_size` elements of one of `tp` ranks. Its length is divisible by `dp`.
    pub fn place(&self, bucket_size: usize, dp: usize, tp: usize) -> Placement {
        let pad = |n: usize, to: usize| n.div_ceil(to) * to;
        let mut buckets: Vec<PlacedBucket> = Vec::new();
        let mut chunk_of_last = None;
        let mut places = vec![(0, 0); self.declared.len()];
        let numel = |spec: &ParamSpec| spec.local_shape(tp).iter().product::<usize>();
        for (at, (spec, role, chunk)) in self.declared.iter().enumerate().rev() {
            if matches!(role, Role::TiedUse(_)) {
                continue;
            }
            let tied = spec.tie_group.is_some();
            let open = chunk_of_last == Some(*chunk)
                && buckets
                    .last()
                    .is_some_and(|bucket| bucket.len < bucket_size && !bucket.tied && !tied);
            if !open {
                buckets.push(PlacedBucket { params: vec![], len: 0, tied });
                chunk_of_last = Some(*chunk);
            }
            let index = buckets.len() - 1;
            let bucket = &mut buckets[index];
            places[at] = (index, bucket.len);
            bucket.params.push(ParamId(at));
            bucket.len = pad(bucket.len + numel(spec), ALIGN);
        }
        for bucket in &mut buckets {
            bucket.len = pad(bucket.len, dp * ALIGN);
        }
        let params = self.declared.iter().enumerate().map(|(at, (spec, role, _))| {
            let (bucket, offset) = if let Role::TiedUse(ParamId(primary)) = role {
                places[*primary]
            } else {
                places[at]
            };
            PlacedParam { spec: spec.clone(), role: *role, bucket, offset, numel: numel(spec) }
        });
        Placement { params: params.collect(), buckets }
    }

    /// Allocates the buckets.
    ///
    /// # Errors
    /// If the device cannot hold them.
    pub fn build(self, options: &StoreOptions) -> Result<ParamStore> {
        let placement = self.place(options.bucket_size, options.dp, options.tp);
        let grad_dtype = options.main_grad_dtype();
        let mut buckets = Vec::new();
        for PlacedBucket { params, len, tied } in placement.buckets {
            let held = params
                .iter()
                .map(|id| &placement.params[id.0])
                .map(|p| p.offset..p.offset + p.numel);
            let grads = GradientBuffer::new(len, held, grad_dtype, &options.device)?;
            let weights = zeros("weights", len, options.dtype, &options.device)?;
            buckets.push(Bucket { params, len, weights, grads, master: None, tied });
        }
        let mut params: Vec<Param> = Vec::new();
        for PlacedParam { spec, role, bucket, offset, numel } in placement.params {
            let shape = spec.local_shape(options.tp);
            let weight =
                buckets[bucket].weights.narrow(0, offset, numel)?.reshape(shape.as_slice())?;
            let (mut stale, mut second_use) = (Arc::new(Stale::new()), None);
            match role {
                Role::TiedUse(ParamId(first)) if !computes_ahead(&options.device) => {
                    let first: &mut Param = &mut params[first];
                    first.first_use = Some(Mutex::default());
                    stale = first.stale.clone();
                }
                Role::TiedUse(_) => {
                    second_use = Some(zeros(
                        "main gradients",
                        shape.as_slice(),
                        grad_dtype,
                        &options.device,
                    )?);
                }
                Role::Primary | Role::TiedCopy => {}
            }
            let pieces = spec.pieces(options.tp_rank, options.tp);
            let first_use = None;
            params.push(Param {
                spec,
                role,
                pieces,
                bucket,
                offset,
                numel,
                weight,
                stale,
                first_use,
                second_use,
            });
        }
        Ok(ParamStore { params, buckets, options: options.clone(), clears_all_grads: false })
    }
}

/// The parameters of one rank.
#[derive(Debug)]
pub struct ParamStore {
    params: Vec<Param>,
    buckets: Vec<Bucket>,
    options: StoreOptions,
    clears_all_grads: bool,
}

impl ParamStore {
    /// From now on every gradient is 0 at the start of a step, so that every microbatch can run the
    /// same additions.
    pub fn clear_all_grads(&mut self) {
        self.clears_all_grads = true;
    }

    pub(super) fn clears_all_grads(&self) -> bool {
        self.clears_all_grads
    }

    /// The parameter's weight, in local shape.
    pub fn weight(&self, id: ParamId) -> &Tensor {
        &self.params[id.0].weight
    }

    /// The parameter with this id.
    pub fn param(&self, id: ParamId) -> &Param {
        &self.params[id.0]
    }

    /// All parameters with their ids, in forward order.
    pub fn iter(&self) -> impl Iterator<Item = (ParamId, &Param)> {
        self.params.iter().enumerate().map(|(i, p)| (ParamId(i), p))
    }

    /// All buckets, in the order in which backward completes them.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// The options that the store was built with.
    pub fn options(&self) -> &StoreOptions {
        &self.options
    }

    /// Allocates master weights for 16-bit weights: fp32 values for fp16, the low halves for bf16.
    /// `range` maps a bucket's length to the elements that this rank updates. Weights of other
    /// dtypes need no master weights. Later assignments write to both.
    ///
    /// # Errors
    /// If the device cannot hold them.
    pub fn keep_masters(&mut self, range: impl Fn(usize) -> Range<usize>) -> Result<()> {
        let dtype = match self.options.dtype {
            DType::BF16 => DType::I16,
            DType::F16 => DType::F32,
            _ => return Ok(()),
        };
        for bucket in &mut self.buckets {
            let range = range(bucket.len);
            let values = zeros("master weights", range.len(), dtype, &self.options.device)?;
            bucket.master = Some(Master { range, values });
        }
        Ok(())
    }

    /// Draws every parameter's initial value.
    ///
    /// # Errors
    /// If a weight cannot be written.
    pub fn initialize(&self, seed: u64) -> Result<()> {
        for param in self.params.iter().filter(|p| !matches!(p.role, Role::TiedUse(_))) {
            let values = initial_values(&param.spec, self.options.tp_rank, self.options.tp, seed);
            self.assign(param, values)?;
        }
        Ok(())
    }

    /// Writes fp32 values (local shape, row-major) to a parameter: to its master weight, if it has
    /// one, and rounded to the model's dtype to its weight.
    ///
    /// # Errors
    /// If the number of values does not match the parameter.
    pub fn assign(&self, param: &Param, values: Vec<f32>) -> Result<()> {
        let source = Tensor::from_vec(values, param.numel, &self.options.device)?;
        let Some(master) = &self.buckets[param.bucket].master else {
            kernels::ops::reduce::cast(&param.weight, &source)?;
            return Ok(());
        };
        for (part, kept) in master.parts(param.range()) {
            let from = source.narrow(0, part.start - param.offset, part.len())?;
            let weight = self.buckets[param.bucket].weights.narrow(0, part.start, part.len())?;
            if self.options.dtype == DType::BF16 {
                kernels::ops::remainders::split(
                    &from,
                    &weight,
                    kept.then(|| master.narrow(&part)).transpose()?.as_ref(),
                )?;
            } else {
                kernels::ops::reduce::cast(&weight, &from)?;
                if kept {
                    kernels::ops::reduce::copy(&master.narrow(&part)?, &from)?;
                }
            }
        }
        Ok(())
    }

    /// Bytes of weights, main gradients and master weights.
    pub fn bytes(&self) -> usize {
        self.bytes_by_kind().iter().map(|(_, bytes)| bytes).sum()
    }

    /// Bytes of weights, of main gradients, and of master weights.
    pub fn bytes_by_kind(&self) -> [(&'static str, usize); 3] {
        let size = |t: &Tensor| t.elem_count() * t.dtype().size_in_bytes();
        let sum = |of: fn(&Bucket) -> Option<&Tensor>| {
            self.buckets.iter().filter_map(of).map(size).sum::<usize>()
        };
        let grads = self.buckets.iter().map(|b| b.grads.bytes()).sum::<usize>()
            + self.bytes_of_other_uses();
        let masters = sum(|b| b.master.as_ref().map(|master| &master.values));
        [
            ("weights", sum(|b| Some(&b.weights))),
            ("main gradients", grads),
            ("master weights", masters),
        ]
    }
}

/// The part of `whole` that lies in `range`; an empty range within `whole` if they do not overlap.
pub(crate) fn overlap(whole: Range<usize>, range: &Range<usize>) -> Range<usize> {
    let start = range.start.clamp(whole.start, whole.end);
    start..range.end.clamp(start, whole.end)
}
