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

use super::bucket_layout::ElementCounts;
use super::gradients::{GradientBuffer, GradientShard, Stale};
use super::row_sums::RowSums;
use super::unit_window::Lending;
use super::weights::Weights;
use super::{
    BucketLimit, LocalShard, ParamSpec, ParamsBuilder, Piece, PlacedBucket, PlacedParam, Placement,
    Placements, Replica, Residence, initial_values,
};
use crate::{Error, Result};

/// Index of a parameter in its rank's [`ParamStore`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub(super) usize);

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
    /// Local shape.
    pub shape: Vec<usize>,
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
    /// Number of elements, padding included; divisible by the number of replicas.
    pub len: usize,
    /// In model dtype.
    pub weights: Weights,
    /// This rank's gradients: `[len]`, fp32 (f64 for f64 models).
    pub grads: GradientBuffer,
    /// Where gradients are sharded, this rank's shard of the sums over ranks.
    pub reduced: Option<GradientShard>,
    /// The master weights of 16-bit weights, for the elements that this rank updates. Of fp16
    /// weights the fp32 values. Of bf16 weights only the low halves (i16), because the weights are
    /// the high halves ([`kernels::ops::remainders`]).
    pub master: Option<LocalShard>,
    /// Whether it holds a tied weight. Such a bucket is complete only when all uses have been
    /// added.
    pub tied: bool,
}

/// How buckets are laid out.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Dtype of the weights; for gradients see [`Self::main_grad_dtype`].
    pub dtype: DType,
    /// Device of the buckets.
    pub device: Device,
    /// When a bucket is closed.
    pub limit: BucketLimit,
    /// What is sharded.
    pub placements: Placements,
    /// Where weights live between their uses.
    pub weights_in: Residence,
    /// Where master weights, and gradients that are sharded, live between their uses.
    pub optimizer_in: Residence,
    /// This rank among those that hold the same parameters.
    pub replica: Replica,
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

impl ParamsBuilder {
    /// Allocates the buckets.
    ///
    /// # Errors
    /// If the device cannot hold them.
    pub fn build(self, options: &StoreOptions) -> Result<ParamStore> {
        let StoreOptions { placements, replica, .. } = *options;
        if matches!(options.limit, BucketLimit::Unit { .. })
            && let Some(spec) = self.without_unit()
        {
            return Err(Error::config(format!(
                "parameter {} is in no layer's params(), and ZeRO-2 and 3 shard by layer; have its layer name it",
                spec.name
            )));
        }
        let layout = self.place(options.limit, replica.count(), options.tp);
        let here = [&options.weights_in, &options.optimizer_in].map(|r| *r == Residence::Device);
        let elements = layout.elements(placements, replica.num_shards, here);
        let grad_dtype = options.main_grad_dtype();
        let StoreOptions { dtype, device, .. } = options;
        let ranges = |placement| {
            let range = move |b: &PlacedBucket| replica.range(b.len, placement);
            layout.buckets.iter().map(range).collect::<Vec<_>>()
        };
        let shards_of = |what, placement, dtype, residence| {
            LocalShard::zeros(what, ranges(placement), dtype, residence, device)
        };
        let weights = shards_of("weights", placements.weights, *dtype, &options.weights_in)?;
        let is_sharded = placements.gradients == Placement::Sharded;
        let shards: Vec<_> = match &options.optimizer_in {
            _ if !is_sharded => layout.buckets.iter().map(|_| None).collect(),
            // There shards have memory only within a step.
            Residence::Device => {
                let shards = ranges(placements.gradients).into_iter();
                shards.map(|range| Some(GradientShard::on(device, range))).collect()
            }
            elsewhere => {
                let homes =
                    shards_of("main gradients", placements.gradients, grad_dtype, elsewhere)?;
                homes.into_iter().map(|home| Some(GradientShard::at(home, device))).collect()
            }
        };
        let mut buckets = Vec::new();
        let of_buckets = weights.into_iter().zip(shards);
        for (PlacedBucket { params, len, tied }, (weights, reduced)) in
            layout.buckets.into_iter().zip(of_buckets)
        {
            let held =
                params.iter().map(|id| &layout.params[id.0]).map(|p| p.offset..p.offset + p.numel);
            let keeps = computes_ahead(device) && !is_sharded;
            let grads = GradientBuffer::new(len, held, grad_dtype, device, keeps)?;
            let weights = Weights::new(len, weights, device.clone());
            buckets.push(Bucket { params, len, weights, grads, reduced, master: None, tied });
        }
        let mut params: Vec<Param> = Vec::new();
        for PlacedParam { spec, role, bucket, offset, numel } in layout.params {
            let shape = spec.local_shape(options.tp);
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
                shape,
                stale,
                first_use,
                second_use,
            });
        }
        Ok(ParamStore {
            params,
            buckets,
            options: options.clone(),
            elements,
            clears_all_grads: false,
            lending: None,
        })
    }
}

/// The parameters of one rank.
#[derive(Debug)]
pub struct ParamStore {
    params: Vec<Param>,
    buckets: Vec<Bucket>,
    options: StoreOptions,
    elements: ElementCounts,
    clears_all_grads: bool,
    /// How layers get weights that are sharded.
    pub(super) lending: Option<Lending>,
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

    /// The parameter's weight, in local shape: a view of its bucket.
    ///
    /// # Errors
    /// If weights are sharded and the layer that uses this one does not name it.
    pub fn weight(&self, id: ParamId) -> Result<Tensor> {
        let param = self.param(id);
        let whole = self.buckets[param.bucket].weights.whole().map_err(|error| match error {
            Error::Config(why) => Error::config(format!("{}: {why}", param.spec.name)),
            other => other,
        })?;
        Ok(whole.narrow(0, param.offset, param.numel)?.reshape(param.shape.as_slice())?)
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
    /// Each bucket has them for the elements that this rank updates. Weights of other dtypes need
    /// no master weights. Later assignments write to both.
    ///
    /// # Errors
    /// If the device cannot hold them.
    pub fn keep_masters(&mut self) -> Result<()> {
        let dtype = match self.options.dtype {
            DType::BF16 => DType::I16,
            DType::F16 => DType::F32,
            _ => return Ok(()),
        };
        let StoreOptions { placements, replica, ref optimizer_in, ref device, .. } = self.options;
        let ranges = self.buckets.iter().map(|b| replica.range(b.len, placements.optimizer));
        let masters = LocalShard::zeros("master weights", ranges, dtype, optimizer_in, device)?;
        for (bucket, master) in self.buckets.iter_mut().zip(masters) {
            bucket.master = Some(master);
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
        let bucket = &self.buckets[param.bucket];
        let (device, weights) = (&self.options.device, bucket.weights.kept());
        let own = overlap(param.range(), &weights.range);
        let from = |part: &Range<usize>| source.narrow(0, part.start - param.offset, part.len());
        let Some(master) = &bucket.master else {
            if !own.is_empty() {
                let weight = weights.lend(&own, device)?;
                kernels::ops::reduce::cast(&weight, &from(&own)?)?;
                weights.give_back(&own, &weight)?;
            }
            return Ok(());
        };
        for (part, kept) in master.parts(own) {
            let (from, weight) = (from(&part)?, weights.lend(&part, device)?);
            let low = kept.then(|| master.lend(&part, device)).transpose()?;
            if self.options.dtype == DType::BF16 {
                kernels::ops::remainders::split(&from, &weight, low.as_ref())?;
            } else {
                kernels::ops::reduce::cast(&weight, &from)?;
                if let Some(master) = &low {
                    kernels::ops::reduce::copy(master, &from)?;
                }
            }
            weights.give_back(&part, &weight)?;
            low.map_or(Ok(()), |low| master.give_back(&part, &low))?;
        }
        Ok(())
    }

    /// Bytes of weights, main gradients and master weights.
    pub fn bytes(&self) -> usize {
        self.bytes_by_kind().iter().map(|(_, bytes)| bytes).sum()
    }

    /// Bytes of weights, of main gradients, and of master weights. Where they are sharded, whole
    /// units are counted as [`BucketLayout`](super::BucketLayout) does.
    pub fn bytes_by_kind(&self) -> [(&'static str, usize); 3] {
        let masters = self.buckets.iter().filter_map(|bucket| bucket.master.as_ref());
        let masters = masters.map(|master| master.values.bytes_on_device());
        let ElementCounts { weights, gradients } = self.elements;
        let main = self.options.main_grad_dtype().size_in_bytes();
        [
            ("weights", weights * self.options.dtype.size_in_bytes()),
            ("main gradients", gradients * main + self.bytes_of_other_uses()),
            ("master weights", masters.sum()),
        ]
    }
}

/// The part of `whole` that lies in `range`; an empty range within `whole` if they do not overlap.
pub(crate) fn overlap(whole: Range<usize>, range: &Range<usize>) -> Range<usize> {
    let start = range.start.clamp(whole.start, whole.end);
    start..range.end.clamp(start, whole.end)
}
