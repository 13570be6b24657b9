//! From the flags of a layout to a [`ParallelConfig`], with Megatron-LM's defaults.

use megatron::comm::RankInfo;
use megatron::config::{Offload, Origins, ParallelConfig, ScheduleKind};

use super::flags::{LayoutFlags, STRATEGIES};
use super::partition::Split;
use crate::error::{Error, Result};

/// Minimum elements of a gradient bucket on CPUs. A bucket holds memory only while its gradients
/// are needed, and 8 MB are enough for full bandwidth.
const BUCKET_ON_CPUS: usize = 2_000_000;

/// Resolves the layout of a model of `num_layers` layers, for ranks on GPUs or CPUs; `launcher` is
/// this process's place in the world of a launcher. Records the origins of derived values in
/// `origins`.
///
/// # Errors
/// If settings contradict each other or the world. `validate` checks the equations of a layout.
pub fn resolve_layout(
    flags: &LayoutFlags,
    origins: &mut Origins,
    launcher: Option<&RankInfo>,
    num_layers: usize,
    on_gpus: bool,
) -> Result<ParallelConfig> {
    LayoutResolver { flags, origins, on_gpus }.parallel(launcher, num_layers)
}

struct LayoutResolver<'a> {
    flags: &'a LayoutFlags,
    origins: &'a mut Origins,
    on_gpus: bool,
}

impl LayoutResolver<'_> {
    fn parallel(
        &mut self,
        launcher: Option<&RankInfo>,
        num_layers: usize,
    ) -> Result<ParallelConfig> {
        let p = self.flags;
        let data_parallel_size = self.data_parallel_size(launcher)?;
        let split = Split::of(p, self.origins)?;
        let (virtual_pipeline_size, asked) = self.virtual_pipeline_size(num_layers, &split)?;
        let partition = split.partition(
            num_layers,
            p.pipeline_model_parallel_size,
            virtual_pipeline_size,
            self.origins,
        )?;
        let schedule = match (p.pipeline_schedule, asked) {
            (None, _) if virtual_pipeline_size == 1 => ScheduleKind::OneFOneB,
            (None, _) => ScheduleKind::Interleaved,
            (Some(ScheduleKind::Interleaved), None) => {
                return Err(Error::usage(format!(
                    "{} needs virtual stages; set num_layers_per_virtual_pipeline_stage or \
                     num_virtual_stages_per_pipeline_rank",
                    self.origins.cite("pipeline_schedule", "interleaved")
                )));
            }
            (Some(kind @ (ScheduleKind::Gpipe | ScheduleKind::OneFOneB)), Some(asked)) => {
                let name = if kind == ScheduleKind::Gpipe { "gpipe" } else { "1f1b" };
                return Err(Error::usage(format!(
                    "{asked} needs the interleaved schedule, but {} selects another; drop one of them",
                    self.origins.cite("pipeline_schedule", name)
                )));
            }
            (Some(kind), _) => kind,
        };
        let bucket_size = p.bucket_size.unwrap_or_else(|| {
            let (from, size) = match self.on_gpus {
                true => {
                    let replicas = data_parallel_size.saturating_mul(p.context_parallel_size);
                    (
                        "max(40,000,000, 1,000,000 · dp · cp)",
                        replicas.saturating_mul(1_000_000).max(40_000_000),
                    )
                }
                false => ("on CPUs", BUCKET_ON_CPUS),
            };
            self.origins.record("bucket_size", format!("default: {from}"));
            size
        });
        Ok(ParallelConfig {
            tensor_model_parallel_size: p.tensor_model_parallel_size,
            pipeline_model_parallel_size: p.pipeline_model_parallel_size,
            context_parallel_size: p.context_parallel_size,
            data_parallel_size,
            virtual_pipeline_size,
            schedule,
            delay_wgrad_compute: p.delay_wgrad_compute,
            extra_warmup: p.pipeline_extra_warmup,
            partition,
            // Without tensor parallelism there is nothing to split along the sequence; Megatron
            // also turns it off.
            sequence_parallel: p.sequence_parallel && p.tensor_model_parallel_size > 1,
            zero_stage: self.zero_stage()?,
            num_distributed_optimizer_instances: p.num_distributed_optimizer_instances,
            zero_reshard_after_forward: p.zero_reshard_after_forward,
            param_offload: Offload::None,
            overlap_grad_reduce: p.overlap_grad_reduce,
            bucket_size,
        })
    }

    /// The stage of ZeRO, from its three names. --use-distributed-optimizer means at least 1.
    fn zero_stage(&self) -> Result<u8> {
        let p = self.flags;
        let by_strategy = p.data_parallel_sharding_strategy.as_deref().and_then(|strategy| {
            let stage = STRATEGIES.iter().position(|name| *name == strategy)? as u8;
            Some((stage, self.origins.cite("data_parallel_sharding_strategy", strategy)))
        });
        let by_number =
            p.zero_stage.map(|stage| (stage as u8, self.origins.cite("zero_stage", stage)));
        let by_switch = p
            .use_distributed_optimizer
            .then(|| (1, self.origins.cite("use_distributed_optimizer", true)));
        let says = |stage: u8| STRATEGIES[usize::from(stage)];
        match (by_number, by_strategy, by_switch) {
            (Some((a, number)), Some((b, strategy)), _) if a != b => Err(Error::usage(format!(
                "{number} is {}, and {strategy} is stage {b}; leave one of them out",
                says(a)
            ))),
            (Some((0, none)), _, Some((_, switch))) | (_, Some((0, none)), Some((_, switch))) => {
                Err(Error::usage(format!(
                    "{switch} shards the optimizer's state, and {none} shards nothing; leave one of them out"
                )))
            }
            (number, strategy, switch) => {
                Ok(number.or(strategy).or(switch).map_or(0, |(stage, _)| stage))
            }
        }
    }

    /// dp = WORLD_SIZE / (tp·cp·pp) under a launcher; otherwise the given value.
    fn data_parallel_size(&mut self, launcher: Option<&RankInfo>) -> Result<usize> {
        let p = self.flags;
        let Some(launcher) = launcher else {
            return Ok(p.data_parallel_size.unwrap_or(1));
        };
        let sizes = [
            ("tensor_model_parallel_size", p.tensor_model_parallel_size),
            ("context_parallel_size", p.context_parallel_size),
            ("pipeline_model_parallel_size", p.pipeline_model_parallel_size),
        ];
        let cited = sizes.map(|(key, size)| self.origins.cite(key, size)).join(" · ");
        let replica = sizes.iter().fold(1usize, |product, (_, size)| product.saturating_mul(*size));
        let (name, world) = (launcher.variables.world_size, launcher.world_size);
        if replica == 0 || world % replica != 0 {
            let reason = if replica == 0 {
                String::new()
            } else {
                format!(": {world} mod {replica} = {}", world % replica)
            };
            return Err(Error::usage(format!(
                "{name} = {world} (environment) must be a multiple of {cited} = {replica}{reason}; \
                 start a different number of ranks or change the layout"
            )));
        }
        let derived = world / replica;
        match p.data_parallel_size {
            Some(given) if given != derived => Err(Error::usage(format!(
                "{} does not fit: {name} = {world} (environment) / ({cited}) = {derived}; leave data_parallel_size out \
                 or start {} ranks",
                self.origins.cite("data_parallel_size", given),
                given.saturating_mul(replica)
            ))),
            Some(given) => Ok(given),
            None => {
                self.origins.record(
                    "data_parallel_size",
                    format!("{name} = {world} (environment) / {replica}"),
                );
                Ok(derived)
            }
        }
    }

    /// v, and the setting that asks for virtual stages: either their number per stage, or the
    /// layers per virtual stage, which gives v = num_layers / (pp · layers per virtual stage).
    fn virtual_pipeline_size(
        &self,
        num_layers: usize,
        split: &Split,
    ) -> Result<(usize, Option<String>)> {
        let p = self.flags;
        if let Some(found) = split.virtual_stages(p.pipeline_model_parallel_size, self.origins)? {
            let given = [
                ("num_layers_per_virtual_pipeline_stage", p.num_layers_per_virtual_pipeline_stage),
                (
                    "num_virtual_stages_per_pipeline_rank",
                    p.num_virtual_stages_per_pipeline_rank.filter(|v| *v != found.0),
                ),
            ];
            return match given.into_iter().find_map(|(key, value)| Some((key, value?))) {
                Some((key, value)) => Err(Error::usage(format!(
                    "{} makes {} virtual stages per stage, but {} asks for a different number; leave one out",
                    found.1,
                    found.0,
                    self.origins.cite(key, value)
                ))),
                None => Ok((found.0, (found.0 > 1).then_some(found.1))),
            };
        }
        let layers = p.num_layers_per_virtual_pipeline_stage.map(|layers| {
            (layers, self.origins.cite("num_layers_per_virtual_pipeline_stage", layers))
        });
        let number = p
            .num_virtual_stages_per_pipeline_rank
            .map(|v| (v, self.origins.cite("num_virtual_stages_per_pipeline_rank", v)));
        let (per_stage, cited) = match (layers, number) {
            (None, None) => return Ok((1, None)),
            (None, Some((0, cited))) => {
                return Err(Error::usage(format!("{cited} must be at least 1")));
            }
            (None, Some((v, cited))) => return Ok((v, (v > 1).then_some(cited))),
            (Some(layers), None) => layers,
            (Some((_, layers)), Some((_, number))) => {
                return Err(Error::usage(format!(
                    "{layers} and {number} both set the virtual stages; drop one of them"
                )));
            }
        };
        let per_round = per_stage.saturating_mul(p.pipeline_model_parallel_size);
        let counted = num_layers.saturating_add(split.counted_beside());
        if per_round == 0 || !counted.is_multiple_of(per_round) {
            return Err(Error::usage(format!(
                "{} must be a multiple of {} · {}; virtual stages have equally many layers, unless \
                 num_virtual_stages_per_pipeline_rank and pipeline_partition set their number and \
                 sizes",
                self.origins.cite("num_layers", num_layers),
                self.origins.cite("pipeline_model_parallel_size", p.pipeline_model_parallel_size),
                cited
            )));
        }
        Ok(((counted / per_round).max(1), Some(cited)))
    }
}
