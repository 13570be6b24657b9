//! One rank's parameters in flat buckets: weights, their fp32 masters, main gradients, and the
//! views that layers use.
//!
//! Buckets follow Megatron's distributed data parallel: parameters in reverse order of the layers,
//! so that a bucket is complete early in backward. Each bucket is one candle storage for weights
//! and one for fp32 main gradients, so that candle's lock on one bucket never delays work on
//! another.

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

/// What a local parameter is to its tie group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The one that counts: in the norm, in checkpoints.
    Primary,
    /// A copy of a weight whose primary lives on another pipeline stage; kept equal by summing
    /// gradients.
    TiedCopy,
    /// A second use of a weight of this rank: the same storage, and on a CPU the same gradient, to
    /// which the sums of the first use are added once; a gradient of its own on a GPU.
    TiedUse(ParamId),
}

/// One local parameter.
#[derive(Debug)]
pub struct Param {
    /// What it is regardless of layout.
    pub spec: ParamSpec,
    /// Whether its gradient is its own.
    pub role: Role,
    /// Where the local elements lie in the logical tensor.
    pub pieces: Vec<Piece>,
    /// Bucket and first element in it.
    pub bucket: usize,
    /// In elements of the bucket.
    pub offset: usize,
    /// Elements of this rank's share, padding included.
    pub numel: usize,
    /// View of the bucket's weights, in local shape.
    pub weight: Tensor,
    /// Whether the main gradient is none of this step's, so far.
    pub(super) stale: Arc<Stale>,
    /// The gradient of the first of two uses, if the bucket has the second's.
    pub(super) first_use: Option<Mutex<RowSums>>,
    /// The gradient of a second use, in local shape, if the bucket has the first's.
    pub(super) second_use: Option<Tensor>,
}

impl Param {
    /// The elements of its bucket.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.numel
    }
}

/// A contiguous range of parameters that is reduced and stepped as one.
#[derive(Debug)]
pub struct Bucket {
    /// Parameters in it, in buffer order.
    pub params: Vec<ParamId>,
    /// Elements, padding included; divides by dp.
    pub len: usize,
    /// `[len]` in model dtype.
    pub weights: Tensor,
    /// `[len]`, fp32 (f64 for f64 models).
    pub grads: GradientBuffer,
    /// Where weights are 16-bit and this rank steps them.
    pub master: Option<Master>,
    /// Holds a tied weight: complete only once all uses were added up.
    pub tied: bool,
}

/// The fp32 values that 16-bit weights are the rounding of.
#[derive(Debug)]
pub struct Master {
    /// The elements of the bucket that this rank steps.
    pub range: Range<usize>,
    /// `[range.len()]`, of fp16 weights. Of bf16 weights, which are the high halves, the low ones
    /// ([`kernels::ops::remainders`], i16).
    pub values: Tensor,
}

impl Master {
    /// The values of the elements `part` of the bucket, which are in its range.
    ///
    /// # Errors
    /// If they are not.
    pub fn narrow(&self, part: &Range<usize>) -> candle_core::Result<Tensor> {
        self.values.narrow(0, part.start - self.range.start, part.len())
    }

    /// The elements `whole` of the bucket in order, as parts that are in its range (true) or not;
    /// none of them empty.
    pub fn parts(&self, whole: Range<usize>) -> impl Iterator<Item = (Range<usize>, bool)> {
        let kept = overlap(whole.clone(), &self.range);
        let parts =
            [(whole.start..kept.start, false), (kept.clone(), true), (kept.end..whole.end, false)];
        parts.into_iter().filter(|(part, _)| !part.is_empty())
    }
}

/// Where the parameters of one rank lie in its buckets. It is the same for all ranks of a pipeline
/// stage.
#[derive(Clone, Debug)]
pub struct Placement {
    /// In forward order.
    pub params: Vec<PlacedParam>,
    /// In the order in which backward completes them.
    pub buckets: Vec<PlacedBucket>,
}

/// A parameter's place in a bucket.
#[derive(Clone, Debug)]
pub struct PlacedParam {
    /// What it is regardless of layout.
    pub spec: ParamSpec,
    /// Whether its gradient is its own.
    pub role: Role,
    /// Bucket and first element in it; those of the primary for [`Role::TiedUse`].
    pub bucket: usize,
    /// In elements of the bucket.
    pub offset: usize,
    /// Elements of a rank's share, padding included.
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
    /// Of weights; see [`Self::main_grad_dtype`] for gradients.
    pub dtype: DType,
    /// Where buckets are.
    pub device: Device,
    /// Elements after which a bucket is closed.
    pub bucket_size: usize,
    /// Ranks that a bucket is sharded over.
    pub dp: usize,
    /// Ranks that share each layer.
    pub tp: usize,
    /// This rank's number among them, from 0.
    pub tp_rank: usize,
}

impl StoreOptions {
    /// What gradients are summed in: fp32, or f64 of f64 models.
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

/// Elements that parameters start on; keeps SIMD and NCCL ranges aligned (Megatron uses the same).
const ALIGN: usize = 64;

impl ParamsBuilder {
    /// Parameters declared from here on belong to the next chunk; a bucket never spans chunks.
    pub fn next_chunk(&mut self) {
        self.chunk += 1;
    }

    /// Declares a parameter that this rank holds.
    pub fn declare(&mut self, spec: ParamSpec) -> ParamId {
        self.push(spec, Role::Primary)
    }

    /// Declares a further use of a tied weight. If its first use is on this rank they share the
    /// storage, otherwise this rank keeps a copy.
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

    /// The parameters declared so far, in forward order, without further uses of tied weights.
    pub fn specs(&self) -> impl Iterator<Item = &ParamSpec> {
        self.declared
            .iter()
            .filter(|(_, role, _)| !matches!(role, Role::TiedUse(_)))
            .map(|(spec, ..)| spec)
    }

    /// Places the parameters declared so far in buckets of at least `bucket_size` elements, cut
    /// over `tp`, each divisible by `dp`; allocates nothing.
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
    /// From now on a step begins with gradients of 0, to which the same work can be done for every
    /// microbatch.
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

    /// The parameter that `id` was given for.
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

    /// What the store was made with.
    pub fn options(&self) -> &StoreOptions {
        &self.options
    }

    /// Makes masters of 16-bit weights, fp32 or what bf16 weights lack of it, over the `range` of
    /// each bucket (of a length) that this rank steps; weights of other dtypes are their own
    /// masters. Values that are assigned from here on reach both.
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

    /// Draws every parameter's first value.
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

    /// Writes fp32 values (local shape, row-major) into a parameter: into its master, if it has
    /// one, and rounded to the model's dtype into its weight.
    ///
    /// # Errors
    /// If the number of values is not the parameter's.
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

    /// Bytes of weights, masters and gradients.
    pub fn bytes(&self) -> usize {
        self.bytes_by_kind().iter().map(|(_, bytes)| bytes).sum()
    }

    /// Bytes of weights, of main gradients, and of the masters of weights.
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

/// The part of `whole` that lies in `range`; an empty part of `whole` where none does.
pub(crate) fn overlap(whole: Range<usize>, range: &Range<usize>) -> Range<usize> {
    let start = range.start.clamp(whole.start, whole.end);
    start..range.end.clamp(start, whole.end)
}
