//! Completes a step's gradients: sums over tp where they are partial, adds the uses of tied
//! weights, sums over dp.

use candle_core::{DType, Tensor};
use kernels::tensor::device::empty;
use kernels::tensor::trace::{Kind, Part, timed};

use super::declarations;
use crate::Result;
use crate::comm::{Group, ReduceOp, Work};
use crate::params::{Bucket, ParamId, ParamStore, Placement, Role};
use crate::pipeline::GradientListener;
use crate::topology::ReplicaGroups;

/// Reduces the buckets of one rank.
///
/// Every rank of a dp group holds the same buckets and completes them in the same order, so
/// reductions need no agreement.
pub struct GradientReducer {
    tp: Group,
    replicas: ReplicaGroups,
    /// Joins the first and last pipeline stage, where a tied weight lives on both.
    embedding: Option<Group>,
    /// Whether a bucket's reduction runs while backward goes on.
    overlap: bool,
    /// Whether gradients go to their shards after every microbatch (ZeRO-2 and 3).
    shards_gradients: bool,
    /// Gradients per bucket that are not complete yet.
    missing: Vec<Vec<ParamId>>,
    in_flight: Vec<InFlight>,
    /// Dtype of messages, if it is not that of the gradients.
    messages_in: Option<DType>,
    /// Whether no step has ended yet.
    first_step: bool,
}

/// A reduction over replicas in progress.
struct InFlight {
    work: Work,
    then: Then,
}

/// What is to be done with reduced elements.
enum Then {
    /// They are where they belong.
    Nothing,
    /// The message had another dtype than its destination.
    Convert { from: Tensor, to: Tensor },
    /// They are added to a bucket's shard.
    Add { bucket: usize, sums: Tensor },
}

impl GradientReducer {
    /// `tp` and `replicas` are this rank's groups. `embedding` joins the first and last stage if a
    /// tied weight lives on both. The store that [`begin`](Self::begin) is given says what each
    /// replica gets of the sums. With `overlap` a bucket's reduction starts when its last gradient
    /// is complete; where gradients are sharded it does so anyway, and `overlap` lets backward go
    /// on meanwhile.
    pub fn new(
        tp: Group,
        replicas: ReplicaGroups,
        embedding: Option<Group>,
        overlap: bool,
    ) -> Self {
        Self {
            tp,
            replicas,
            embedding,
            overlap,
            shards_gradients: false,
            missing: Vec::new(),
            in_flight: Vec::new(),
            messages_in: None,
            first_step: true,
        }
    }

    /// Sums over replicas in messages of this dtype. Each rank's gradient is rounded before
    /// the sum, and the sum is rounded again.
    pub fn in_dtype(self, messages_in: Option<DType>) -> Self {
        Self { messages_in, ..self }
    }

    /// Begins a step, before its first backward.
    ///
    /// # Errors
    /// If a buffer cannot be written.
    pub fn begin(&mut self, store: &ParamStore) -> Result<()> {
        self.missing = store.buckets().iter().map(|b| b.params.clone()).collect();
        self.in_flight.clear();
        self.shards_gradients = store.options().placements.gradients == Placement::Sharded;
        store.begin_grads()
    }

    /// Waits until all gradients of the step are final on this rank.
    ///
    /// # Errors
    /// If a peer fails; in the first step also if a parameter that is replicated over tp has
    /// different gradients on the tp ranks.
    pub fn finish(&mut self, store: &ParamStore) -> Result<()> {
        if self.shards_gradients {
            self.complete(0, store)?;
        }
        for (i, bucket) in store.buckets().iter().enumerate() {
            // Buckets remain for which no layer announced some gradient, or not in the end. They
            // are the same on all replicas.
            let remains = match &bucket.reduced {
                Some(shard) => bucket.grads.is_there() || shard.sums().is_none(),
                None => !self.overlap || self.missing.get(i).is_none_or(|ids| !ids.is_empty()),
            };
            if bucket.tied || remains {
                self.reduce(i, store)?;
            }
        }
        self.complete(0, store)?;
        self.sum_over_copies(store)?;
        if std::mem::take(&mut self.first_step) {
            declarations::check(&self.tp, store)?;
        }
        Ok(())
    }

    /// Waits until at most `left` reductions are in progress.
    fn complete(&mut self, left: usize, store: &ParamStore) -> Result<()> {
        let done = self.in_flight.len().saturating_sub(left);
        for InFlight { work, then } in self.in_flight.drain(..done) {
            work.wait()?;
            match then {
                Then::Nothing => {}
                Then::Convert { from, to } => kernels::ops::reduce::cast(&to, &from)?,
                Then::Add { bucket, sums } => {
                    let dtype = store.options().main_grad_dtype();
                    let sums = if sums.dtype() == dtype {
                        sums
                    } else {
                        let wide = empty(sums.elem_count(), dtype, sums.device())?;
                        kernels::ops::reduce::cast(&wide, &sums)?;
                        wide
                    };
                    if let Some(shard) = &store.buckets()[bucket].reduced {
                        shard.add(sums)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn reduce(&mut self, index: usize, store: &ParamStore) -> Result<()> {
        let _span = timed("reduce gradients", Kind::Phase, Part::Reduce);
        let bucket = &store.buckets()[index];
        store.clear_stale(&bucket.params)?;
        self.sum_over_tp(bucket, store)?;
        if bucket.tied {
            self.add_tied_uses(bucket, store)?;
        }
        if bucket.reduced.is_some() {
            return self.reduce_to_shard(index, store);
        }
        if self.replicas.all.size() == 1 {
            return Ok(());
        }
        let placement = store.options().placements.optimizer;
        let mine = self.replicas.replica().range(bucket.len, placement);
        let (grads, part) = (bucket.grads.all()?, bucket.grads.narrow(&mine)?);
        let (from, to) = if self.messages_in.is_some() {
            let from = self.message(grads)?;
            let to = from.narrow(0, mine.start, mine.len())?;
            (from, to)
        } else {
            (grads, part.clone())
        };
        let work = match placement {
            Placement::Sharded => self.replicas.shards.reduce_scatter(&from, &to, ReduceOp::Sum)?,
            Placement::Replicated => self.replicas.all.all_reduce(&from, ReduceOp::Sum)?,
        };
        let then = match self.messages_in {
            Some(_) => Then::Convert { from: to, to: part },
            None => Then::Nothing,
        };
        self.in_flight.push(InFlight { work, then });
        Ok(())
    }

    /// Adds a bucket's gradients to the ranks' shards, and frees them.
    fn reduce_to_shard(&mut self, index: usize, store: &ParamStore) -> Result<()> {
        let bucket = &store.buckets()[index];
        let grads = bucket.grads.all()?;
        // What the next microbatch adds gets other memory, since the message still needs this one.
        store.release_grads_of(bucket);
        let from = self.message(grads)?;
        let len = bucket.len / self.replicas.shards.size();
        let sums = match bucket.tied {
            // The largest bucket of a small model, reduced once a step: in place, since there may
            // be no room for its shard beside it.
            true => from.narrow(0, self.replicas.shards.rank() * len, len)?,
            // Among what backward has freed, which is enough room.
            false => empty(len, from.dtype(), from.device())?,
        };
        let work = self.replicas.shards.reduce_scatter(&from, &sums, ReduceOp::Sum)?;
        drop(from);
        self.in_flight.push(InFlight { work, then: Then::Add { bucket: index, sums } });
        self.complete(usize::from(self.overlap), store)
    }

    /// `grads` rounded to the dtype of messages, or as they are.
    fn message(&self, grads: Tensor) -> Result<Tensor> {
        let Some(dtype) = self.messages_in else { return Ok(grads) };
        let message = empty(grads.elem_count(), dtype, grads.device())?;
        kernels::ops::reduce::cast(&message, &grads)?;
        Ok(message)
    }

    /// Under hybrid sharding, sums the shards over their copies, once a step.
    fn sum_over_copies(&self, store: &ParamStore) -> Result<()> {
        let is_sharded = store.options().placements.optimizer == Placement::Sharded;
        if self.replicas.copies.size() == 1 || !is_sharded {
            return Ok(());
        }
        let mut works = Vec::new();
        for bucket in store.buckets() {
            let mine = self.replicas.replica().range(bucket.len, Placement::Sharded);
            let part = bucket.reduced(&mine)?;
            let message = self.message(part.clone())?;
            let work = self.replicas.copies.all_reduce(&message, ReduceOp::Sum)?;
            works.push((bucket, work, message, part));
        }
        for (bucket, work, message, part) in works {
            work.wait()?;
            if self.messages_in.is_some() {
                kernels::ops::reduce::cast(&part, &message)?;
            }
            if let Some(shard) = &bucket.reduced {
                shard.set(&part)?;
            }
        }
        Ok(())
    }

    /// Sums the gradients that are partial over tp, with one message per bucket.
    fn sum_over_tp(&self, bucket: &Bucket, store: &ParamStore) -> Result<()> {
        if self.tp.size() == 1 {
            return Ok(());
        }
        let partial = bucket.params.iter().filter(|id| store.param(**id).spec.grad_partial_over_tp);
        let partial = partial.map(|id| store.grad(*id)).collect::<Result<Vec<_>>>()?;
        match &partial[..] {
            [] => return Ok(()),
            // For a single tensor, candle's `cat` returns the tensor itself; it is summed in place.
            [grad] => return self.tp.all_reduce(grad, ReduceOp::Sum)?.wait(),
            _ => (),
        }
        let flat =
            partial.iter().map(|g| g.flatten_all()).collect::<candle_core::Result<Vec<_>>>()?;
        let joined = Tensor::cat(&flat, 0)?;
        self.tp.all_reduce(&joined, ReduceOp::Sum)?.wait()?;
        let mut at = 0;
        for grad in partial {
            let len = grad.elem_count();
            kernels::ops::reduce::copy(&grad, &joined.narrow(0, at, len)?.reshape(grad.shape())?)?;
            at += len;
        }
        Ok(())
    }

    /// Adds the gradient of the embedding's use and that of the head's use. Each is summed
    /// separately first, whether both are on one rank or on two.
    fn add_tied_uses(&self, bucket: &Bucket, store: &ParamStore) -> Result<()> {
        for id in &bucket.params {
            store.add_first_use(*id)?;
        }
        if let Some(group) = &self.embedding {
            group.all_reduce(&bucket.grads.all()?, ReduceOp::Sum)?.wait()?;
        }
        Ok(())
    }
}

impl GradientListener for GradientReducer {
    fn ready(&mut self, params: &[ParamId], store: &ParamStore) -> Result<()> {
        if !self.overlap && !self.shards_gradients {
            return Ok(());
        }
        for id in params {
            let param = store.param(*id);
            let (at, bucket) = (param.bucket, &store.buckets()[param.bucket]);
            if bucket.tied || matches!(param.role, Role::TiedUse(_)) {
                continue; // complete only when all uses are
            }
            let missing = &mut self.missing[at];
            let before = missing.len();
            missing.retain(|other| other != id);
            if missing.is_empty() && before > 0 {
                if self.shards_gradients {
                    // The next microbatch completes it again.
                    missing.clone_from(&bucket.params);
                    if !bucket.grads.is_there() {
                        continue; // a forward made them, and they were reduced then
                    }
                }
                self.reduce(at, store)?;
            }
        }
        Ok(())
    }

    fn after_every_microbatch(&self) -> bool {
        self.shards_gradients
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::comm::threads::solo;
    use crate::params::{
        BucketLimit, Init, ParamSpec, ParamsBuilder, Partition, Placements, Replica, Residence,
        StoreOptions,
    };

    fn spec(name: &str, tie_group: Option<&str>) -> ParamSpec {
        ParamSpec {
            name: name.into(),
            shape: vec![4, 2],
            partition: Partition::Replicated,
            padded_dim0: 4,
            init: Init::Zeros,
            weight_decay: false,
            tie_group: tie_group.map(str::to_string),
            grad_partial_over_tp: false,
        }
    }

    fn values(t: &Tensor) -> Vec<f32> {
        t.flatten_all().unwrap().to_vec1().unwrap()
    }

    /// Covers gradients from a product, from sums, of a matrix with two uses, and of parameters
    /// that no layer reached, announced or not.
    #[test]
    fn a_step_ends_with_the_sums_of_its_own_gradients() {
        let device = Device::Cpu;
        let mut params = ParamsBuilder::default();
        let [word, product, sum, unused] =
            [("word", Some("word")), ("product", None), ("sum", None), ("unused", None)]
                .map(|(name, tie)| params.declare(spec(name, tie)));
        let output = params.declare_tied(spec("word", Some("word")));
        let options = StoreOptions {
            dtype: DType::F32,
            device: device.clone(),
            limit: BucketLimit::Elements(1),
            placements: Placements::REPLICATED,
            weights_in: Residence::Device,
            optimizer_in: Residence::Device,
            replica: Replica::new(0, 1, 1),
            tp: 1,
            tp_rank: 0,
        };
        let store = params.build(&options).unwrap();
        let full = |value: f32, shape: (usize, usize)| Tensor::full(value, shape, &device).unwrap();
        let ids = Tensor::new(&[3u32, 1, 3], &device).unwrap();
        for (step, overlap) in [false, false, true, true].into_iter().enumerate() {
            let mut reducer =
                GradientReducer::new(solo(), ReplicaGroups::whole(solo()), None, overlap);
            for bucket in store.buckets() {
                kernels::ops::reduce::copy(
                    &bucket.grads.all().unwrap(),
                    &full(f32::NAN, (1, bucket.len)).flatten_all().unwrap(),
                )
                .unwrap();
            }
            if step % 2 == 1 {
                store.release_grads();
            }
            reducer.begin(&store).unwrap();
            for _ in 0..=step {
                store.add_weight_grad(output, &full(1.0, (1, 4)), &full(10.0, (1, 2))).unwrap();
                store.add_weight_grad(product, &full(1.0, (1, 4)), &full(2.0, (1, 2))).unwrap();
                kernels::ops::reduce::add_inplace(&store.grad(sum).unwrap(), &full(3.0, (4, 2)))
                    .unwrap();
                store.add_embedding_grad(word, &full(1.0, (3, 2)), &ids, 0).unwrap();
            }
            let announced = [unused, output, sum, product, word];
            reducer.ready(if step == 3 { &announced[1..] } else { &announced }, &store).unwrap();
            reducer.finish(&store).unwrap();
            let times = (step + 1) as f32;
            // Reads as the optimizer does, because requesting a gradient would clear a stale one.
            let got = [word, product, sum, unused].map(|id| {
                let param = &store.iter().find(|(other, _)| *other == id).unwrap().1;
                values(&store.buckets()[param.bucket].grads.narrow(&param.range()).unwrap())
            });
            let rows = [10.0, 10.0, 11.0, 11.0, 10.0, 10.0, 12.0, 12.0].map(|value| value * times);
            assert_eq!(
                got,
                [rows, [2.0 * times; 8], [3.0 * times; 8], [0.0; 8]],
                "step {step}, overlap {overlap}"
            );
        }
    }
}
