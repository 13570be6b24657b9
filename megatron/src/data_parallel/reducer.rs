//! Completes a step's gradients: sums over tp where they are partial, adds the uses of tied
//! weights, sums over dp.

use candle_core::{DType, Tensor};

use super::declarations;
use crate::Result;
use crate::comm::{Group, ReduceOp, Work};
use crate::params::{Bucket, ParamId, ParamStore, Role};
use crate::pipeline::GradientListener;

/// The range of a bucket that replica `rank` of `dp` keeps under ZeRO.
pub fn shard(len: usize, rank: usize, dp: usize) -> std::ops::Range<usize> {
    let part = len / dp;
    rank * part..(rank + 1) * part
}

/// Reduces the buckets of one rank.
///
/// Every rank of a dp group holds the same buckets and completes them in the same order, so
/// reductions need no agreement.
pub struct GradientReducer {
    tp: Group,
    replicas: Group,
    /// Joins the first and last pipeline stage, where a tied weight lives on both.
    embedding: Option<Group>,
    /// Whether each replica receives only its shard of the sum (ZeRO-1).
    scatter: bool,
    /// Whether a bucket's reduction starts while backward still runs, when the bucket's last
    /// gradient is complete.
    overlap: bool,
    /// Number of gradients per bucket that are not complete yet.
    missing: Vec<usize>,
    in_flight: Vec<InFlight>,
    /// Whether messages are in bf16.
    in_bf16: bool,
    /// Whether no step has ended yet.
    first_step: bool,
}

/// A reduction over dp in progress.
struct InFlight {
    work: Work,
    /// Source and destination of the reduced elements, if the message has another dtype.
    convert: Option<(Tensor, Tensor)>,
}

impl GradientReducer {
    /// `tp` and `replicas` (dp × cp) are this rank's groups. `embedding` joins the first and last
    /// stage if a tied weight lives on both. With `scatter` a replica gets only its [`shard`] of
    /// the sums (ZeRO-1). With `overlap` a bucket's reduction starts when its last gradient is
    /// complete.
    pub fn new(
        tp: Group,
        replicas: Group,
        embedding: Option<Group>,
        scatter: bool,
        overlap: bool,
    ) -> Self {
        Self {
            tp,
            replicas,
            embedding,
            scatter,
            overlap,
            missing: Vec::new(),
            in_flight: Vec::new(),
            in_bf16: false,
            first_step: true,
        }
    }

    /// Sums over dp in bf16 messages of half the size. Each rank's gradient is rounded before the
    /// sum, and the sum is rounded again.
    pub fn in_bf16(self, in_bf16: bool) -> Self {
        Self { in_bf16, ..self }
    }

    /// Begins a step, before its first backward.
    ///
    /// # Errors
    /// If a buffer cannot be written.
    pub fn begin(&mut self, store: &ParamStore) -> Result<()> {
        self.missing = store.buckets().iter().map(|b| b.params.len()).collect();
        self.in_flight.clear();
        store.begin_grads()
    }

    /// Waits until all gradients of the step are final on this rank.
    ///
    /// # Errors
    /// If a peer fails; in the first step also if a parameter that is replicated over tp has
    /// different gradients on the tp ranks.
    pub fn finish(&mut self, store: &ParamStore) -> Result<()> {
        for (i, bucket) in store.buckets().iter().enumerate() {
            // Under overlap, buckets remain for which no layer announced some gradient. They are
            // the same on all replicas.
            if !self.overlap
                || bucket.tied
                || self.missing.get(i).is_none_or(|&missing| missing > 0)
            {
                self.reduce(bucket, store)?;
            }
        }
        for InFlight { work, convert } in self.in_flight.drain(..) {
            work.wait()?;
            if let Some((from, to)) = convert {
                kernels::ops::reduce::cast(&to, &from)?;
            }
        }
        if std::mem::take(&mut self.first_step) {
            let (rank, replicas) = (self.replicas.rank(), self.replicas.size());
            let final_part = |len| if self.scatter { shard(len, rank, replicas) } else { 0..len };
            declarations::check(&self.tp, store, final_part)?;
        }
        Ok(())
    }

    fn reduce(&mut self, bucket: &Bucket, store: &ParamStore) -> Result<()> {
        store.clear_stale(&bucket.params)?;
        self.sum_over_tp(bucket, store)?;
        if bucket.tied {
            self.add_tied_uses(bucket, store)?;
        }
        if self.replicas.size() == 1 {
            return Ok(());
        }
        let mine = if self.scatter {
            shard(bucket.len, self.replicas.rank(), self.replicas.size())
        } else {
            0..bucket.len
        };
        let (grads, part) = (bucket.grads.all()?, bucket.grads.narrow(&mine)?);
        let (from, to) = if self.in_bf16 {
            let from = kernels::tensor::device::empty(bucket.len, DType::BF16, grads.device())?;
            kernels::ops::reduce::cast(&from, &grads)?;
            let to = from.narrow(0, mine.start, mine.len())?;
            (from, to)
        } else {
            (grads, part.clone())
        };
        let work = if self.scatter {
            self.replicas.reduce_scatter(&from, &to, ReduceOp::Sum)?
        } else {
            self.replicas.all_reduce(&from, ReduceOp::Sum)?
        };
        self.in_flight.push(InFlight { work, convert: self.in_bf16.then_some((to, part)) });
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
        if !self.overlap {
            return Ok(());
        }
        for id in params {
            let param = store.param(*id);
            let bucket = &store.buckets()[param.bucket];
            if bucket.tied || matches!(param.role, Role::TiedUse(_)) {
                continue; // complete only when all uses are
            }
            self.missing[param.bucket] -= 1;
            if self.missing[param.bucket] == 0 {
                self.reduce(bucket, store)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::comm::threads::solo;
    use crate::params::{Init, ParamSpec, ParamsBuilder, Partition, StoreOptions};

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
            bucket_size: 1,
            dp: 1,
            tp: 1,
            tp_rank: 0,
        };
        let store = params.build(&options).unwrap();
        let full = |value: f32, shape: (usize, usize)| Tensor::full(value, shape, &device).unwrap();
        let ids = Tensor::new(&[3u32, 1, 3], &device).unwrap();
        for (step, overlap) in [false, false, true, true].into_iter().enumerate() {
            let mut reducer = GradientReducer::new(solo(), solo(), None, false, overlap);
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
