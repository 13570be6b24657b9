//! AdamW and SGD over flat buckets, whole or cut over dp (ZeRO-1, Rajbhandari et al. 2020), with
//! clipping by global norm. 16-bit weights are the rounding of fp32 masters, which are what is
//! stepped (Micikevicius et al. 2018).

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use kernels::ops::clip::Verdict;
use kernels::ops::optimizer::{
    AdamW, Segment, Sgd, StochasticRounding, adamw_segments, sgd_segments,
};

use super::ownership::{speaks_for, written_part};
use super::state::BucketState;
use crate::Result;
use crate::comm::{Group, Work};
use crate::config::{MomentDtype, OptimizerConfig, OptimizerKind};
use crate::data_parallel::shard;
use crate::params::{
    Elements, Param, ParamStore, Piece, Role, ShardRef, StateKind, clip_pieces, overlap,
};

/// Elements whose halves are joined at a time, on the host.
const JOINED: usize = 1 << 20;

/// An update that is queued. Whether it changes anything the device decides; see
/// [`Optimizer::settle`].
#[must_use = "the optimizer has to learn whether the update was made"]
pub struct Queued(Verdict);

impl Queued {
    /// What [`Optimizer::settle`] wants on the host, once the step has ended.
    pub fn verdict(&self) -> &Tensor {
        self.0.values()
    }
}

/// What schedules say of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Of this step, warm-up and decay included.
    pub learning_rate: f64,
    /// Of this step, for parameters that decay.
    pub weight_decay: f64,
}

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepResult {
    /// Norm of the gradient before clipping; not finite where the step was skipped.
    pub grad_norm: f32,
    /// Whether parameters were updated.
    pub applied: bool,
}

/// The optimizer of one rank.
pub struct Optimizer {
    config: OptimizerConfig,
    states: Vec<BucketState>,
    tp: Group,
    replicas: Group,
    pp: Group,
    /// State and updates are cut over the replicas (dp × cp).
    sharded: bool,
    /// Of what rounds second moments in bf16.
    seed: u64,
    /// Updates applied so far.
    steps: u64,
}

impl Optimizer {
    /// `sharded`: ZeRO-1; `seed`: of what rounds second moments in bf16.
    ///
    /// # Errors
    /// If there is no room for the state, or it is to be moved to the host's memory and is there.
    pub fn new(
        config: &OptimizerConfig,
        store: &ParamStore,
        tp: Group,
        replicas: Group,
        pp: Group,
        sharded: bool,
        seed: u64,
    ) -> Result<Self> {
        let cut = |len| if sharded { shard(len, replicas.rank(), replicas.size()) } else { 0..len };
        let ranges = store.buckets().iter().map(|bucket| cut(bucket.len)).collect();
        let (device, of) = (&store.options().device, store.options().main_grad_dtype());
        let dtypes = match config.kind {
            OptimizerKind::Adam => {
                vec![config.exp_avg_dtype.dtype(of), config.exp_avg_sq_dtype.dtype(of)]
            }
            OptimizerKind::Sgd => vec![of],
        };
        let states = BucketState::zeros(ranges, &dtypes, &config.offload, device)?;
        Ok(Self { config: config.clone(), states, tp, replicas, pp, sharded, seed, steps: 0 })
    }

    /// Updates applied so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Continues from a checkpoint.
    pub fn set_steps(&mut self, steps: u64) {
        self.steps = steps;
    }

    /// Steps with another weight decay from here on.
    pub fn set_weight_decay(&mut self, weight_decay: f64) {
        self.config.weight_decay = weight_decay;
    }

    /// Bytes of optimizer state on this rank's device.
    pub fn bytes(&self) -> usize {
        self.states.iter().map(BucketState::bytes).sum()
    }

    /// The part of a parameter that this rank steps, as a range of its bucket.
    fn part(&self, param: &Param) -> Range<usize> {
        overlap(param.range(), &self.states[param.bucket].range)
    }

    /// Parameters that have a place of their own in a bucket.
    fn stepped(store: &ParamStore) -> impl Iterator<Item = &Param> {
        store.iter().map(|(_, p)| p).filter(|p| !matches!(p.role, Role::TiedUse(_)))
    }

    /// Whether this rank speaks for the parameter among its tie group and the tp ranks that hold
    /// the same.
    fn counts(&self, param: &Param) -> bool {
        speaks_for(&param.spec, param.role, self.tp.rank())
    }

    /// This rank's share of the squared norm of the model's main gradient, every logical parameter
    /// counted once: f64 `[1]` on the device.
    fn squared_norm(&self, store: &ParamStore) -> Result<Tensor> {
        let counted = Self::stepped(store).filter(|p| self.counts(p)).map(|param| {
            let part = self.part(param);
            store.buckets()[param.bucket].grads.narrow(&part)
        });
        let counted = counted.collect::<Result<Vec<_>>>()?;
        Ok(kernels::ops::reduce::total_of_squares(
            &counted.iter().collect::<Vec<_>>(),
            &store.options().device,
        )?)
    }

    /// The elements of its bucket that this rank counts of a parameter: over all ranks every
    /// logical one once.
    fn counted(&self, param: &Param) -> Range<usize> {
        if !self.counts(param) {
            return 0..0;
        }
        match (self.sharded, self.replicas.rank()) {
            (true, _) => self.part(param),
            (false, 0) => param.range(),
            (false, _) => 0..0,
        }
    }

    /// This rank's share of the squared norm of the model's parameters, in fp32 where weights are
    /// 16-bit: over all ranks every logical parameter once. On a GPU it is waited for.
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
            let weights = |part: &Range<usize>| bucket.weights.narrow(0, part.start, part.len());
            match &bucket.master {
                None => tensors.push(weights(&part)?),
                Some(master) if bucket.weights.dtype() == DType::BF16 => {
                    for start in part.clone().step_by(JOINED) {
                        let some = start..part.end.min(start + JOINED);
                        let halves = Elements::Halves {
                            high: weights(&some)?,
                            low: Some(master.narrow(&some)?),
                        };
                        let values = Tensor::from_vec(halves.to_f32()?, some.len(), &Device::Cpu)?;
                        squares += kernels::ops::reduce::sum_of_squares(&values)?;
                    }
                }
                Some(master) => tensors.push(master.narrow(&part)?),
            }
        }
        let tensors: Vec<&Tensor> = tensors.iter().collect();
        let total = kernels::ops::reduce::total_of_squares(&tensors, &store.options().device)?;
        Ok(squares + total.to_vec1::<f64>()?[0])
    }

    /// How many elements of the model's main gradient are zero in this rank's share: over all ranks
    /// every logical element once, without padding. On a GPU it is waited for.
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
            let grads = store.buckets()[param.bucket].grads.narrow(&part)?;
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

    /// Everybody's `shares`, f64 `[n]` of each rank, one after the other, on the device. Added in
    /// this order, they are the same sum on every rank, whatever carries them.
    fn gathered(shares: &Tensor, group: &Group) -> Result<Tensor> {
        if group.size() == 1 {
            return Ok(shares.clone());
        }
        let all = Tensor::zeros(group.size() * shares.elem_count(), DType::F64, shares.device())?;
        group.all_gather(shares, &all)?.wait()?;
        Ok(all)
    }

    /// Queues an update from the main gradients, which are `loss_scale` times the loss's. If their
    /// norm is not finite it changes nothing, on any rank. On a GPU norm, clipping and that
    /// decision stay there: nobody waits for them here.
    ///
    /// # Errors
    /// If a peer fails.
    pub fn step(&self, store: &ParamStore, rates: Rates, loss_scale: f64) -> Result<Queued> {
        // In order of rank over tp × pp, by groups that are there anyway: a communicator of NCCL's
        // takes memory and queues.
        let mut shares =
            Self::gathered(&Self::gathered(&self.squared_norm(store)?, &self.tp)?, &self.pp)?;
        if self.sharded && self.replicas.size() > 1 {
            shares = Self::gathered(&kernels::ops::reduce::sum_in_order(&shares)?, &self.replicas)?;
        }
        let verdict = Verdict::of(&shares, self.config.clip_grad, loss_scale)?;
        // A GPU does all of it, and changes nothing, rather than wait for the verdict.
        if verdict.known()?.is_some_and(|decided| !decided.applied) {
            return Ok(Queued(verdict));
        }
        for bucket in 0..store.buckets().len() {
            self.update(bucket, store, rates, &verdict)?;
        }
        if self.sharded {
            let gathers = store.buckets().iter().zip(&self.states).map(|(bucket, state)| {
                let mine = bucket.weights.narrow(0, state.range.start, state.range.len())?;
                self.replicas.all_gather(&mine, &bucket.weights)
            });
            for work in gathers.collect::<Result<Vec<Work>>>()? {
                work.wait()?;
            }
        }
        Ok(Queued(verdict))
    }

    /// Counts the update that [`step`](Self::step) queued, if it was made: `verdict` is
    /// [`Queued::verdict`], read by the host.
    ///
    /// # Errors
    /// If `verdict` is something else.
    pub fn settle(&mut self, _: Queued, verdict: &Tensor) -> Result<StepResult> {
        let decided = Verdict::read(verdict)?;
        if decided.applied {
            self.steps += 1;
        }
        Ok(StepResult { grad_norm: decided.norm, applied: decided.applied })
    }

    /// What this rank steps of a bucket, in order: its parameters, some without weight decay, each
    /// with the padding before it.
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
        // Padding is 0, and so are its gradients: a step leaves it so.
        push(range.end - at, false, StochasticRounding::default());
        segments.retain(|segment| segment.len > 0);
        segments
    }

    /// Steps this rank's range of a bucket, in one pass over memory.
    fn update(
        &self,
        bucket: usize,
        store: &ParamStore,
        rates: Rates,
        verdict: &Verdict,
    ) -> Result<()> {
        let Rates { learning_rate: lr, weight_decay } = rates;
        let (segments, state, bucket) =
            (self.segments(bucket, store), &self.states[bucket], &store.buckets()[bucket]);
        let adam = AdamW {
            lr,
            beta1: self.config.adam_beta1,
            beta2: self.config.adam_beta2,
            eps: self.config.adam_eps,
            weight_decay,
            // Every update before has been settled.
            step: self.steps + 1,
            grad_scale: 1.0,
        };
        let sgd = Sgd { lr, momentum: self.config.sgd_momentum, weight_decay, grad_scale: 1.0 };
        state.change(&store.options().device, &mut |part, kept| {
            let weight = bucket.weights.narrow(0, part.start, part.len())?;
            let (stepped, rounded) = match &bucket.master {
                Some(master) => (&master.narrow(part)?, Some(&weight)),
                None => (&weight, None),
            };
            let grad = bucket.grads.narrow(part)?;
            let segments = Segment::of_part(
                &segments,
                part.start - state.range.start..part.end - state.range.start,
            );
            let verdict = Some(verdict);
            Ok(match kept.get(1) {
                Some(second) => adamw_segments(
                    stepped, rounded, &grad, &kept[0], second, &adam, verdict, &segments,
                ),
                None => sgd_segments(stepped, rounded, &grad, &kept[0], &sgd, verdict, &segments),
            }?)
        })
    }

    /// This rank's share of weights and optimizer state as a checkpoint sees them. With `owned`,
    /// every logical element is given by exactly one rank of the world (for saving); without,
    /// everything that this rank holds (for loading). A parameter with a master is saved as its
    /// master; loading fills both from the one logical tensor.
    ///
    /// # Errors
    /// If a view cannot be made.
    pub fn shards(&self, store: &ParamStore, owned: bool) -> Result<Vec<ShardRef>> {
        let mut shards = Vec::new();
        for param in Self::stepped(store) {
            if owned && !self.counts(param) {
                continue;
            }
            let bucket = &store.buckets()[param.bucket];
            let state = &self.states[param.bucket];
            let whole = param.range();
            let written = || {
                written_part(whole.clone(), bucket.len, self.replicas.rank(), self.replicas.size())
            };
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
            let weights = |range: &Range<usize>| bucket.weights.narrow(0, range.start, range.len());
            match &bucket.master {
                Some(master) if bucket.weights.dtype() == DType::BF16 => {
                    for (part, kept) in master.parts(if owned { written() } else { whole.clone() })
                    {
                        push(StateKind::Param, part, &|part| {
                            let low = kept.then(|| master.narrow(part)).transpose()?;
                            Ok(Elements::Halves { high: weights(part)?, low })
                        })?;
                    }
                }
                Some(master) => {
                    let range =
                        if owned { written() } else { overlap(whole.clone(), &master.range) };
                    push(StateKind::Param, range, &|range| Ok(master.narrow(range)?.into()))?;
                    if !owned {
                        push(StateKind::Param, whole.clone(), &|range| Ok(weights(range)?.into()))?;
                    }
                }
                None => {
                    let range = if owned { written() } else { whole.clone() };
                    push(StateKind::Param, range, &|range| Ok(weights(range)?.into()))?;
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

/// How the elements of a piece of a tensor of shape `global` are rounded: by their numbers in it,
/// row-major. The piece's box is whole in all dimensions but the first and the last.
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
