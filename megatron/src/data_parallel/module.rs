//! Data parallelism for a model that candle trains: an equivalent of torch's
//! `DistributedDataParallel` for the variables of a [`VarMap`].

use std::collections::HashMap;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, TensorId, Var};
use candle_nn::VarMap;

use crate::comm::{Group, ReduceOp};
use crate::{Error, Result};

/// How a [`DataParallel`] reduces gradients. Names and defaults are torch's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataParallelOptions {
    /// Minimum bytes of gradients per message.
    pub bucket_cap_bytes: usize,
    /// If a rank's graph does not reach a variable, use a zero gradient instead of an error.
    pub find_unused_parameters: bool,
}

impl Default for DataParallelOptions {
    fn default() -> Self {
        Self { bucket_cap_bytes: 25 << 20, find_unused_parameters: false }
    }
}

/// Replicas of one model. Their gradients are averaged over the ranks of a group.
///
/// Each rank computes the loss of its own samples and calls [`backward`](Self::backward) instead of
/// candle's. Any candle-nn optimizer accepts the returned gradients. All messages are sent after
/// backward: candle's graph does not report when a gradient is complete, so communication does not
/// overlap with computation. For overlap, ZeRO, tensor and pipeline parallelism use
/// [`AutogradLayer`](crate::tensor_parallel::AutogradLayer) in a
/// [`Trainer`](crate::train::Trainer).
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, Optimizer, SGD, VarBuilder, VarMap, linear};
/// use megatron::data_parallel::DataParallel;
///
/// # fn main() -> megatron::Result<()> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let model = linear(4, 1, vb)?;
/// let mut replicas = DataParallel::new(&vars, megatron::comm::solo(), Default::default())?;
/// let mut sgd = SGD::new(replicas.vars(), 0.1)?;
///
/// let loss = model.forward(&Tensor::ones((8, 4), DType::F32, &Device::Cpu)?)?.sqr()?.mean_all()?;
/// sgd.step(&replicas.backward(&loss)?)?;
/// # Ok(())
/// # }
/// ```
pub struct DataParallel {
    group: Group,
    options: DataParallelOptions,
    /// Sorted by name, so that the order is the same on every rank.
    vars: Vec<(String, Var)>,
    /// Indices of the variables that are reduced together; all have the same dtype.
    buckets: Vec<Vec<usize>>,
    /// Sums of the gradients from [`no_sync`](Self::no_sync).
    accumulated: HashMap<TensorId, Tensor>,
}

impl DataParallel {
    /// Wraps the variables of a model that is already built, and copies rank 0's values to every
    /// rank. Collective over `group`.
    ///
    /// # Errors
    /// If the names, shapes or dtypes of the variables differ between ranks; the error names the
    /// first difference.
    pub fn new(vars: &VarMap, group: Group, options: DataParallelOptions) -> Result<Self> {
        let mut vars: Vec<(String, Var)> = match vars.data().lock() {
            Ok(vars) => vars.iter().map(|(name, var)| (name.clone(), var.clone())).collect(),
            Err(_) => return Err(Error::config("a thread panicked while it held the variables")),
        };
        vars.sort_by(|a, b| a.0.cmp(&b.0));
        agree(&vars, &group)?;
        for (_, var) in &vars {
            group.broadcast(var.as_tensor(), 0)?.wait()?;
        }
        let mut buckets: Vec<Vec<usize>> = Vec::new();
        let mut open: HashMap<DType, (usize, usize)> = HashMap::new();
        // In reverse order, as torch does.
        for (index, (_, var)) in vars.iter().enumerate().rev() {
            let (dtype, bytes) = (var.dtype(), var.elem_count() * var.dtype().size_in_bytes());
            match open.get_mut(&dtype).filter(|(_, held)| *held < options.bucket_cap_bytes) {
                Some((bucket, held)) => {
                    buckets[*bucket].push(index);
                    *held += bytes;
                }
                None => {
                    open.insert(dtype, (buckets.len(), bytes));
                    buckets.push(vec![index]);
                }
            }
        }
        Ok(Self { group, options, vars, buckets, accumulated: HashMap::new() })
    }

    /// The variables, for an optimizer.
    pub fn vars(&self) -> Vec<Var> {
        self.vars.iter().map(|(_, var)| var.clone()).collect()
    }

    /// Computes the gradients of this rank's loss and adds them to sums for the next
    /// [`backward`](Self::backward). Sends no messages. Equivalent to torch's `no_sync`.
    ///
    /// # Errors
    /// If candle cannot compute them.
    pub fn no_sync(&mut self, loss: &Tensor) -> Result<()> {
        let grads = loss.backward()?;
        for (_, var) in &self.vars {
            let Some(grad) = grads.get(var) else { continue };
            let sum = match self.accumulated.remove(&var.id()) {
                Some(sum) => (sum + grad)?,
                None => grad.clone(),
            };
            self.accumulated.insert(var.id(), sum);
        }
        Ok(())
    }

    /// Computes the gradients of this rank's loss, adds those that [`no_sync`](Self::no_sync) kept,
    /// and averages over ranks. Every rank returns the same gradients. Collective over the group.
    ///
    /// # Errors
    /// If a peer was lost, or if a variable is not reached by the graph of every rank. In the
    /// second case all ranks name the variable. With `find_unused_parameters` this is no error.
    pub fn backward(&mut self, loss: &Tensor) -> Result<GradStore> {
        let mut grads = loss.backward()?;
        for (_, var) in &self.vars {
            let Some(kept) = self.accumulated.remove(&var.id()) else { continue };
            let sum = match grads.remove(var) {
                Some(grad) => (kept + grad)?,
                None => kept,
            };
            grads.insert(var, sum);
        }
        self.check_reached(&grads)?;
        for bucket in &self.buckets {
            let flat = bucket.iter().map(|&index| {
                let var = &self.vars[index].1;
                let zeros = || Tensor::zeros(var.elem_count(), var.dtype(), var.device());
                grads.get(var).map_or_else(zeros, |grad| grad.contiguous()?.flatten_all())
            });
            let flat = flat.collect::<candle_core::Result<Vec<_>>>()?;
            // For a single tensor, candle's `cat` returns the tensor itself, which may be shared.
            let sum = match &flat[..] {
                [only] => only.copy()?,
                _ => Tensor::cat(&flat, 0)?,
            };
            self.group.all_reduce(&sum, ReduceOp::Sum)?.wait()?;
            let mean = (sum / self.group.size() as f64)?;
            let mut at = 0;
            for &index in bucket {
                let var = &self.vars[index].1;
                let grad = mean.narrow(0, at, var.elem_count())?.reshape(var.shape())?;
                grads.insert(var, grad);
                at += var.elem_count();
            }
        }
        Ok(grads)
    }

    fn check_reached(&self, grads: &GradStore) -> Result<()> {
        if self.options.find_unused_parameters {
            return Ok(());
        }
        let missing = |name: &str, who: String| {
            Error::config(format!(
                "the loss's graph has no gradient of {name}{who}: the model does not use it, or an operation without backward cuts the \
                 graph, as candle_nn's LayerNorm, RmsNorm and softmax_last_dim do; `find_unused_parameters` takes it for zero"
            ))
        };
        let reached: Vec<u8> =
            self.vars.iter().map(|(_, var)| u8::from(grads.get(var).is_some())).collect();
        let ranks = self.group.all_gather_bytes(&reached)?;
        for (index, (name, _)) in self.vars.iter().enumerate() {
            let without: Vec<String> = (0..ranks.len())
                .filter(|rank| ranks[*rank].get(index) != Some(&1))
                .map(|rank| rank.to_string())
                .collect();
            if !without.is_empty() {
                let all = without.len() == ranks.len();
                let who = format!(" on rank {}", without.join(", "));
                return Err(missing(name, if all { String::new() } else { who }));
            }
        }
        Ok(())
    }
}

/// Checks that all ranks have the same variables as rank 0.
fn agree(vars: &[(String, Var)], group: &Group) -> Result<()> {
    let mut own = String::new();
    for (name, var) in vars {
        own += &format!("{name} {:?} of {}\n", var.dims(), var.dtype().as_str());
    }
    let all = group.all_gather_bytes(own.as_bytes())?;
    for (rank, other) in all.iter().enumerate().skip(1) {
        if *other == all[0] {
            continue;
        }
        let [first, other] =
            [&all[0], other].map(|text| String::from_utf8_lossy(text).into_owned());
        let (mut a, mut b) = (first.lines(), other.lines());
        let differing = loop {
            match (a.next(), b.next()) {
                (Some(a), Some(b)) if a == b => continue,
                (a, b) => break [a, b].map(|line| line.unwrap_or("nothing more").to_string()),
            }
        };
        return Err(Error::config(format!(
            "ranks have different models: rank 0 has {}, rank {rank} has {}",
            differing[0], differing[1]
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use candle_nn::{Init, Module, Optimizer, SGD, VarBuilder, linear};

    use super::*;
    use crate::comm::{solo, threads};

    const WIDTH: usize = 6;

    /// Trains three layers for ten steps. Each step has eight samples, split over the ranks.
    fn train(group: Group, microbatches: usize, bucket_cap_bytes: usize) -> Vec<f32> {
        let (ranks, rank) = (group.size(), group.rank());
        let vars = VarMap::new();
        let device = Device::Cpu;
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &device);
        // Every rank draws its own values; the values of rank 0 count.
        let model = [0, 1, 2].map(|i| linear(WIDTH, WIDTH, vb.pp(i)).unwrap());
        for (i, var) in sorted(&vars).iter().enumerate() {
            let n = var.elem_count();
            let own = Tensor::arange(0, n as u32, &device).unwrap().to_dtype(DType::F32).unwrap();
            let own = ((own * 0.37).unwrap() + (i + 10 * rank) as f64).unwrap().sin().unwrap();
            var.set(&own.reshape(var.shape()).unwrap()).unwrap();
        }
        let options = DataParallelOptions { bucket_cap_bytes, ..Default::default() };
        let mut replicas = DataParallel::new(&vars, group, options).unwrap();
        let mut sgd = SGD::new(replicas.vars(), 0.05).unwrap();
        let mut losses = Vec::new();
        for step in 0..10 {
            let per_rank = 8 / ranks / microbatches;
            let mut total = 0.0;
            for microbatch in 0..microbatches {
                let first = (step * 8 + (rank * microbatches + microbatch) * per_rank) * WIDTH;
                let x = Tensor::arange(first as u32, (first + per_rank * WIDTH) as u32, &device);
                let x = x.unwrap().to_dtype(DType::F32).unwrap().sin().unwrap();
                let x = x.reshape((per_rank, WIDTH)).unwrap();
                let mut y = x.clone();
                for layer in &model {
                    y = layer.forward(&y).unwrap().tanh().unwrap();
                }
                let loss = (y - x).unwrap().sqr().unwrap().mean_all().unwrap();
                let loss = (loss / microbatches as f64).unwrap();
                total += loss.to_scalar::<f32>().unwrap();
                if microbatch + 1 < microbatches {
                    replicas.no_sync(&loss).unwrap();
                } else {
                    sgd.step(&replicas.backward(&loss).unwrap()).unwrap();
                }
            }
            losses.push(total);
        }
        losses
    }

    fn sorted(vars: &VarMap) -> Vec<Var> {
        let vars = vars.data().lock().unwrap();
        let mut vars: Vec<_> = vars.iter().collect();
        vars.sort_by_key(|(name, _)| (*name).clone());
        vars.into_iter().map(|(_, var)| var.clone()).collect()
    }

    fn on_ranks<T: Send>(n: usize, f: impl Fn(Group) -> T + Sync) -> Vec<T> {
        threads::run(n, |group| Ok(f(group))).unwrap()
    }

    #[test]
    fn replicas_train_as_one_process_does() {
        let alone = train(solo(), 1, 1 << 20);
        assert!(alone[9] < alone[0] * 0.9, "{alone:?}");
        for (ranks, microbatches, bucket) in [(2, 1, 1 << 20), (4, 1, 100), (2, 2, 1), (1, 4, 1)] {
            let cut = on_ranks(ranks, |group| train(group, microbatches, bucket));
            for step in 0..10 {
                let mean = cut.iter().map(|losses| losses[step]).sum::<f32>() / ranks as f32;
                let difference = (mean - alone[step]).abs();
                assert!(difference < 1e-6, "{ranks} ranks, step {step}: {mean} {}", alone[step]);
            }
        }
    }

    #[test]
    fn different_models_and_unused_variables_are_named_on_every_rank() {
        let model = |rows: usize| {
            let vars = VarMap::new();
            let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
            let used = vb.get_with_hints((rows, 2), "used", Init::Const(1.0)).unwrap();
            let unused = vb.get_with_hints(3, "unused", Init::Const(1.0)).unwrap();
            (vars, used, unused)
        };
        let refused = on_ranks(2, |group| {
            let rank = group.rank();
            DataParallel::new(&model(4 + rank).0, group, Default::default()).err().unwrap()
        });
        for error in refused {
            let text = error.to_string();
            assert!(text.contains("rank 0 has used [4, 2]"), "{text}");
            assert!(text.contains("rank 1 has used [5, 2]"), "{text}");
        }
        // Only rank 1's loss uses it.
        let losses = |vars: &VarMap, used: &Tensor, unused: &Tensor, group: Group, find: bool| {
            let own = group.rank() == 1;
            let options =
                DataParallelOptions { find_unused_parameters: find, ..Default::default() };
            let mut replicas = DataParallel::new(vars, group, options).unwrap();
            let mut loss = used.sum_all().unwrap();
            if own {
                loss = (loss + unused.sum_all().unwrap()).unwrap();
            }
            replicas.backward(&loss)
        };
        for error in on_ranks(2, |group| {
            let (vars, used, unused) = model(4);
            losses(&vars, &used, &unused, group, false).err().unwrap().to_string()
        }) {
            assert!(error.contains("no gradient of unused on rank 0:"), "{error}");
        }
        for half in on_ranks(2, |group| {
            let (vars, used, unused) = model(4);
            let grads = losses(&vars, &used, &unused, group, true).unwrap();
            grads.get(&unused).unwrap().to_vec1::<f32>().unwrap()
        }) {
            assert_eq!(half, [0.5; 3]);
        }
    }
}
