//! AdamW and SGD over flat buckets, whole or sharded over dp (ZeRO, Rajbhandari et al. 2020),
//! with clipping by global norm. For 16-bit weights the optimizer updates fp32 master weights and
//! rounds them (Micikevicius et al. 2018).

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use kernels::ops::clip::Verdict;
use kernels::ops::optimizer::{
    AdamW, Segment, Sgd, StochasticRounding, adamw_segments, sgd_segments,
};
use kernels::tensor::trace::{Kind, Part, timed};

use super::ownership::speaks_for;
use super::state::{BucketState, Column};
use crate::comm::{Group, Work};
use crate::config::{MomentDtype, OptimizerConfig, OptimizerKind};
use crate::params::{
    Bucket, Elements, LocalShard, Param, ParamStore, Piece, Placement, Placements, Replica,
    Residence, Role, ShardRef, StateKind, StoreOptions, clip_pieces, overlap,
};
use crate::topology::ReplicaGroups;
use crate::{Error, Result};

/// Elements whose high and low halves are joined at a time, on the host.
const JOINED: usize = 1 << 20;

/// A queued update. The device decides whether it changes anything; see [`Optimizer::settle`].
#[must_use = "the optimizer has to learn whether the update was made"]
pub struct Queued(Verdict);

impl Queued {
    /// The tensor that [`Optimizer::settle`] needs, copied to the host, at the end of the step.
    pub fn verdict(&self) -> &Tensor {
        self.0.values()
    }
}

/// The scheduled rates of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Learning rate of this step, with warm-up and decay applied.
    pub learning_rate: f64,
    /// Weight decay of this step, for parameters that decay.
    pub weight_decay: f64,
    /// `beta1` and `beta2` of this step's AdamW update, if the schedule cycles them; otherwise the
    /// configured ones apply.
    pub betas: Option<[f64; 2]>,
}

/// The outcome of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepResult {
    /// Norm of the gradient before clipping. It is not finite if the step was skipped.
    pub grad_norm: f32,
    /// Whether parameters were updated.
    pub applied: bool,
}

/// The optimizer of one rank.
pub struct Optimizer {
    config: OptimizerConfig,
    states: Vec<BucketState>,
    tp: Group,
    replicas: ReplicaGroups,
    pp: Group,
    placements: Placements,
    /// Seed of the stochastic rounding of second moments in bf16.
    seed: u64,
    /// Updates applied so far.
    steps: u64,
}

impl Optimizer {
    /// `store` says what is sharded over `replicas`. `seed` seeds the stochastic rounding of second moments in bf16.
    ///
    /// # Errors
    /// If there is no room for the state, or if it is to be offloaded to host memory while the
    /// parameters are already there.
    pub fn new(
        config: &OptimizerConfig,
        store: &ParamStore,
        tp: Group,
        replicas: ReplicaGroups,
        pp: Group,
        seed: u64,
    ) -> Result<Self> {
        let StoreOptions { placements, replica, .. } = *store.options();
        let range = |bucket: &Bucket| replica.range(bucket.len, placements.optimizer);
        let ranges = store.buckets().iter().map(range).collect();
        let (device, of) = (&store.options().device, store.options().main_grad_dtype());
        let dtypes = match config.kind {
            OptimizerKind::Adam => {
                vec![config.exp_avg_dtype.dtype(of), config.exp_avg_sq_dtype.dtype(of)]
            }
            OptimizerKind::Sgd => vec![of],
        };
        let residence = &store.options().optimizer_in;
        let states = BucketState::zeros(ranges, &dtypes, residence, device)?;
        Ok(Self { config: config.clone(), states, tp, replicas, pp, placements, seed, steps: 0 })
    }

    /// Updates applied so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Sets the number of applied updates, when a run continues from a checkpoint.
    pub fn set_steps(&mut self, steps: u64) {
        self.steps = steps;
    }

    /// Sets the weight decay of later steps.
    pub fn set_weight_decay(&mut self, weight_decay: f64) {
        self.config.weight_decay = weight_decay;
    }

    /// Bytes of optimizer state on this rank's device.
    pub fn bytes(&self) -> usize {
        self.states.iter().map(BucketState::bytes).sum()
    }

    /// The part of a parameter that this rank updates, as a range of its bucket.
    fn part(&self, param: &Param) -> Range<usize> {
        overlap(param.range(), &self.states[param.bucket].range)
    }

    /// Parameters with their own place in a bucket.
    fn stepped(store: &ParamStore) -> impl Iterator<Item = &Param> {
        store.iter().map(|(_, p)| p).filter(|p| !matches!(p.role, Role::TiedUse(_)))
    }

    /// Whether this rank is the one that counts the parameter, among its tie group and the tp ranks
    /// that hold the same values.
    fn counts(&self, param: &Param) -> bool {
        speaks_for(&param.spec, param.role, self.tp.rank())
    }

    /// This rank's share of the squared norm of the model's main gradient: f64 `[1]` on the device.
    /// Over all ranks every logical parameter is counted once.
    fn squared_norm(&self, store: &ParamStore) -> Result<Tensor> {
        let counted = Self::stepped(store).filter(|p| self.counts(p)).map(|param| {
            let part = self.part(param);
            store.buckets()[param.bucket].reduced(&part)
        });
        let device = &store.options().device;
        let squares = |tensors: &[&Tensor]| kernels::ops::reduce::total_of_squares(tensors, device);
        if store.options().optimizer_in != Residence::Device {
            // One at a time, since each is a copy. The sum has the same order.
            let each = counted.map(|grads| Ok(squares(&[&grads?])?)).collect::<Result<Vec<_>>>()?;
            return match &each[..] {
                [] => Ok(squares(&[])?),
                each => Ok(kernels::ops::reduce::sum_in_order(&Tensor::cat(each, 0)?)?),
            };
        }
        let counted = counted.collect::<Result<Vec<_>>>()?;
        Ok(squares(&counted.iter().collect::<Vec<_>>())?)
    }

    /// The part of a parameter that this rank counts, as a range of its bucket. Over all ranks
    /// every logical element is counted once.
    fn counted(&self, param: &Param) -> Range<usize> {
        if !self.counts(param) {
            return 0..0;
        }
        let Replica { shard, copy, .. } = self.replicas.replica();
        match self.placements.optimizer {
            Placement::Sharded if copy == 0 => self.part(param),
            Placement::Replicated if (copy, shard) == (0, 0) => param.range(),
            _ => 0..0,
        }
    }

    /// This rank's share of the squared norm of the model's parameters, in fp32 for 16-bit weights.
    /// Over all ranks every logical parameter is counted once. Waits for a GPU.
    ///
    /// # Errors
    /// If parameters cannot be read.
    pub fn squared_params(&self, store: &ParamStore) -> Result<f64> {
        let (mut tensors, mut squares) = (Vec::new(), 0.0);
        for param in Self::stepped(store) {
            let (part, bucket) = (self.counted(param), &store.buckets()[param.bucket]);
            if part.is_empty() {
                continue;
            }
            let device = &store.options().device;
            let weights = |part: &Range<usize>| bucket.weights.kept().lend(part, device);
            match &bucket.master {
                None => tensors.push(weights(&part)?),
                Some(master) if store.options().dtype == DType::BF16 => {
                    for start in part.clone().step_by(JOINED) {
                        let some = start..part.end.min(start + JOINED);
                        let low = master.narrow(&some)?;
                        let halves =
                            Elements::Halves { high: weights(&some)?.into(), low: Some(low) };
                        let values = Tensor::from_vec(halves.to_f32()?, some.len(), &Device::Cpu)?;
                        squares += kernels::ops::reduce::sum_of_squares(&values)?;
                    }
                }
                Some(master) => tensors.push(master.lend(&part, device)?),
            }
            if store.options().weights_in != Residence::Device {
                // Copies are not to be there all at once.
                for copy in tensors.drain(..) {
                    squares += kernels::ops::reduce::sum_of_squares(&copy)?;
                }
            }
        }
        let tensors: Vec<&Tensor> = tensors.iter().collect();
        let total = kernels::ops::reduce::total_of_squares(&tensors, &store.options().device)?;
        Ok(squares + total.to_vec1::<f64>()?[0])
    }

    /// The number of zero elements in this rank's share of the model's main gradient. Over all
    /// ranks every logical element is counted once, without padding. Waits for a GPU.
    ///
    /// # Errors
    /// If gradients cannot be read.
    pub fn zeros_in_grad(&self, store: &ParamStore) -> Result<u64> {
        let mut zeros = 0;
        for param in Self::stepped(store) {
            let part = self.counted(param);
            if part.is_empty() {
                continue;
            }
            let grads = store.buckets()[param.bucket].reduced(&part)?;
            for piece in
                clip_pieces(&param.pieces, part.start - param.offset..part.end - param.offset)
            {
                let held = piece.local_range();
                zeros +=
                    kernels::ops::reduce::count_zeros(&grads.narrow(0, held.start, held.len())?)?;
            }
        }
        Ok(zeros)
    }

    /// The `shares` of all ranks, f64 `[n]` each, concatenated on the device. Adding them in this
    /// order gives the same sum on every rank, whatever the transport.
    fn gathered(shares: &Tensor, group: &Group) -> Result<Tensor> {
        if group.size() == 1 {
            return Ok(shares.clone());
        }
        let all = Tensor::zeros(group.size() * shares.elem_count(), DType::F64, shares.device())?;
        group.all_gather(shares, &all)?.wait()?;
        Ok(all)
    }

    /// Queues an update from the main gradients, which are scaled by `loss_scale`. If their norm is
    /// not finite, the update changes nothing on any rank. On a GPU the norm, the clipping and that
    /// decision stay on the device, and the host does not wait.
    ///
    /// # Errors
    /// If a peer fails.
    pub fn step(&self, store: &ParamStore, rates: Rates, loss_scale: f64) -> Result<Queued> {
        // Gathers in order of rank over tp × pp. It uses existing groups, because another NCCL
        // communicator would cost memory and queues.
        let mut shares =
            Self::gathered(&Self::gathered(&self.squared_norm(store)?, &self.tp)?, &self.pp)?;
        let (placements, shards) = (self.placements, &self.replicas.shards);
        if placements.optimizer == Placement::Sharded && shards.size() > 1 {
            shares = Self::gathered(&kernels::ops::reduce::sum_in_order(&shares)?, shards)?;
        }
        let verdict = Verdict::of(&shares, self.config.clip_grad, loss_scale)?;
        // A GPU runs the whole update without changing anything instead of waiting for the verdict.
        if verdict.known()?.is_some_and(|decided| !decided.applied) {
            return Ok(Queued(verdict));
        }
        for bucket in 0..store.buckets().len() {
            self.update(bucket, store, rates, &verdict)?;
        }
        if (placements.weights, placements.optimizer) == (Placement::Replicated, Placement::Sharded)
        {
            let _span = timed("gather weights", Kind::Phase, Part::Gather);
            let gathers = store.buckets().iter().zip(&self.states).map(|(bucket, state)| {
                let whole = bucket.weights.whole()?;
                let own = whole.narrow(0, state.range.start, state.range.len())?;
                shards.all_gather(&own, &whole)
            });
            for work in gathers.collect::<Result<Vec<Work>>>()? {
                work.wait()?;
            }
        }
        Ok(Queued(verdict))
    }

    /// Counts the update that [`step`](Self::step) queued, if it was applied. `verdict` is
    /// [`Queued::verdict`], copied to the host.
    ///
    /// # Errors
    /// If `verdict` is another tensor.
    pub fn settle(&mut self, _: Queued, verdict: &Tensor) -> Result<StepResult> {
        let decided = Verdict::read(verdict)?;
        if decided.applied {
            self.steps += 1;
        }
        Ok(StepResult { grad_norm: decided.norm, applied: decided.applied })
    }

    /// The segments of a bucket that this rank updates, in order. A segment has one weight decay
    /// and one rounding. Padding belongs to the segment of the parameter after it.
    fn segments(&self, bucket: usize, store: &ParamStore) -> Vec<Segment> {
        let range = &self.states[bucket].range;
        let mut segments: Vec<Segment> = Vec::new();
        let mut push =
            |len: usize, decays: bool, rounding: StochasticRounding| match segments.last_mut() {
                Some(last) if (last.decays, last.rounding) == (decays, rounding) => last.len += len,
                _ => segments.push(Segment { len, decays, rounding }),
            };
        let is_stochastic = self.config.exp_avg_sq_dtype == MomentDtype::Bf16;
        let mut at = range.start;
        for param in store.buckets()[bucket].params.iter().map(|id| store.param(*id)) {
            let part = self.part(param);
            if part.is_empty() {
                continue;
            }
            let decays = param.spec.weight_decay;
            if is_stochastic {
                let key = StochasticRounding::key(self.seed, &param.spec.name, self.steps + 1);
                for piece in
                    clip_pieces(&param.pieces, part.start - param.offset..part.end - param.offset)
                {
                    let local = piece.local_range();
                    push(part.start + local.start - at, decays, StochasticRounding::default());
                    push(local.len(), decays, rounding(key, &piece, &param.spec.shape));
                    at = part.start + local.end;
                }
            }
            push(part.end - at, decays, StochasticRounding::default());
            at = part.end;
        }
        // Padding stays 0 through an update, because its gradients are 0, too.
        push(range.end - at, false, StochasticRounding::default());
        segments.retain(|segment| segment.len > 0);
        segments
    }

    /// Updates this rank's range of a bucket, in one pass over memory.
    fn update(
        &self,
        bucket: usize,
        store: &ParamStore,
        rates: Rates,
        verdict: &Verdict,
    ) -> Result<()> {
        let Rates { learning_rate: lr, weight_decay, betas } = rates;
        let [beta1, beta2] = betas.unwrap_or([self.config.adam_beta1, self.config.adam_beta2]);
        let (segments, state, bucket) =
            (self.segments(bucket, store), &self.states[bucket], &store.buckets()[bucket]);
        let adam = AdamW {
            lr,
            beta1,
            beta2,
            eps: self.config.adam_eps,
            weight_decay,
            // All earlier updates have been settled.
            step: self.steps + 1,
            grad_scale: 1.0,
        };
        let sgd = Sgd { lr, momentum: self.config.sgd_momentum, weight_decay, grad_scale: 1.0 };
        let range = &state.range;
        let changed = |shard: &LocalShard| Column { shard: shard.clone(), changes: true };
        let grads = Column { shard: bucket.reduced_shard()?, changes: false };
        let mut columns = vec![changed(bucket.weights.kept()), grads];
        columns.extend(bucket.master.iter().map(changed));
        columns.extend(state.values.iter().map(changed));
        super::state::update(range, &columns, &store.options().device, &mut |part, here| {
            let [weight, grad, rest @ ..] = here else {
                return Err(Error::config("internal error: an update without its columns"));
            };
            let (stepped, rounded, kept) = match rest {
                [master, kept @ ..] if bucket.master.is_some() => (master, Some(weight), kept),
                kept => (weight, None, kept),
            };
            let segments =
                Segment::of_part(&segments, part.start - range.start..part.end - range.start);
            let verdict = Some(verdict);
            Ok(match kept {
                [first, second] => {
                    adamw_segments(stepped, rounded, grad, first, second, &adam, verdict, &segments)
                }
                [momentum] => {
                    sgd_segments(stepped, rounded, grad, momentum, &sgd, verdict, &segments)
                }
                _ => return Err(Error::config("internal error: an update without its state")),
            }?)
        })
    }

    /// This rank's share of weights and optimizer state in the form of a checkpoint. With `owned`
    /// (for saving), exactly one rank of the world gives each logical element. Without it (for
    /// loading), the result is everything that this rank holds. A parameter with a master weight is
    /// saved as its master weight; loading fills both from the one logical tensor.
    ///
    /// # Errors
    /// If a view cannot be created.
    pub fn shards(&self, store: &ParamStore, owned: bool) -> Result<Vec<ShardRef>> {
        let mut shards = Vec::new();
        for param in Self::stepped(store) {
            if owned && !self.counts(param) {
                continue;
            }
            let bucket = &store.buckets()[param.bucket];
            let state = &self.states[param.bucket];
            let whole = param.range();
            let written = || overlap(whole.clone(), &self.replicas.replica().written(bucket.len));
            let here = overlap(whole.clone(), &bucket.weights.kept().range);
            let mut push = |kind,
                            range: Range<usize>,
                            data: &dyn Fn(&Range<usize>) -> Result<Elements>|
             -> Result<()> {
                let pieces =
                    clip_pieces(&param.pieces, range.start - whole.start..range.end - whole.start);
                if range.is_empty() || pieces.is_empty() {
                    return Ok(());
                }
                let (name, global_shape) = (param.spec.name.clone(), param.spec.shape.clone());
                let partition = Some(param.spec.partition);
                shards.push(ShardRef {
                    name,
                    kind,
                    global_shape,
                    partition,
                    pieces,
                    data: data(&range)?,
                });
                Ok(())
            };
            let weights = bucket.weights.kept();
            match &bucket.master {
                Some(master) if store.options().dtype == DType::BF16 => {
                    for (part, kept) in master.parts(if owned { written() } else { here }) {
                        push(StateKind::Param, part, &|part| {
                            let low = kept.then(|| master.narrow(part)).transpose()?;
                            Ok(Elements::Halves { high: weights.narrow(part)?, low })
                        })?;
                    }
                }
                Some(master) => {
                    let range =
                        if owned { written() } else { overlap(whole.clone(), &master.range) };
                    push(StateKind::Param, range, &|range| master.elements(range))?;
                    if !owned {
                        push(StateKind::Param, here, &|range| weights.elements(range))?;
                    }
                }
                None => {
                    let range = if owned { written() } else { here };
                    push(StateKind::Param, range, &|range| weights.elements(range))?;
                }
            }
            let moments = if owned { written() } else { self.part(param) };
            let kinds: &[StateKind] = match self.config.kind {
                OptimizerKind::Adam => &[StateKind::ExpAvg, StateKind::ExpAvgSq],
                OptimizerKind::Sgd => &[StateKind::Momentum],
            };
            for (which, kind) in kinds.iter().enumerate() {
                push(*kind, moments.clone(), &|range| state.part(which, range))?;
            }
        }
        Ok(shards)
    }
}

/// The stochastic rounding of a piece's elements, keyed by their row-major index in a tensor of
/// shape `global`. The piece's box must cover all dimensions except the first and the last
/// completely.
fn rounding(key: u32, piece: &Piece, global: &[usize]) -> StochasticRounding {
    let (Some(&width), Some(&pitch)) = (piece.shape.last(), global.last()) else {
        return StochasticRounding::whole(key);
    };
    let strides = global.iter().enumerate().map(|(d, _)| global[d + 1..].iter().product::<usize>());
    let first: usize =
        piece.offset.iter().zip(strides).map(|(offset, stride)| offset * stride).sum();
    StochasticRounding {
        key,
        row: (first + piece.flat.start / width * pitch) as u64,
        column: (piece.flat.start % width) as u64,
        width: width as u64,
        pitch: pitch as u64,
    }
}
