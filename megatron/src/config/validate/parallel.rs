//! Checks of the layout: its equations, the schedule, and what is sharded.

use super::Check;
use crate::config::{
    ModelConfig, Offload, ParallelConfig, PartitionMethod, ScheduleKind, type_regex,
};

impl Check<'_> {
    pub(super) fn parallel(&mut self, p: &ParallelConfig, m: &ModelConfig) {
        let (tp, pp, v) =
            (p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.virtual_pipeline_size);
        self.size("tensor_model_parallel_size", tp);
        self.size("pipeline_model_parallel_size", pp);
        self.size("context_parallel_size", p.context_parallel_size);
        self.size("data_parallel_size", p.data_parallel_size);
        self.positive("bucket_size", p.bucket_size);
        let cp = p.context_parallel_size;
        let sizes = [
            ("tensor_model_parallel_size", tp),
            ("context_parallel_size", cp),
            ("pipeline_model_parallel_size", pp),
            ("data_parallel_size", p.data_parallel_size),
        ];
        let world = sizes.iter().try_fold(1usize, |product, &(_, size)| product.checked_mul(size));
        self.require(world.is_some(), |c| {
            format!("the product of {} is too large", c.cite_all(&sizes))
        });
        self.sharding(p);
        let by_tp = [("tensor_model_parallel_size", tp)];
        self.divides(
            "num_attention_heads",
            m.num_attention_heads,
            &by_tp,
            "a head cannot be split over tensor-parallel ranks",
        );
        self.divides(
            "num_query_groups",
            m.num_query_groups,
            &by_tp,
            "a key/value head cannot be split over tensor-parallel ranks",
        );
        self.divides(
            "ffn_hidden_size",
            m.ffn_hidden_size,
            &by_tp,
            "the MLP is split evenly over tensor-parallel ranks",
        );
        let by_cp = ("context_parallel_size", cp);
        if cp > 1 && tp > 0 && m.num_query_groups.is_multiple_of(tp) {
            self.divides(
                "num_query_groups",
                m.num_query_groups,
                &[("tensor_model_parallel_size", tp), by_cp],
                "context-parallel ranks share the key/value heads of a tensor-parallel rank, and a head cannot be split",
            );
        }
        // Sequence parallelism also splits each context-parallel rank's part.
        let cuts = [(p.sequence_parallel, by_tp[0]), (cp > 1, by_cp)];
        let cuts: Vec<_> = cuts.into_iter().filter(|(cut, _)| *cut).map(|(_, by)| by).collect();
        self.divides(
            "seq_length",
            m.seq_length,
            &cuts,
            "every rank holds an equal part of a sample",
        );
        self.schedule(p);
        self.layers(p, m.num_layers, pp.saturating_mul(v));
    }

    fn schedule(&mut self, p: &ParallelConfig) {
        let interleaved = p.schedule == ScheduleKind::Interleaved;
        self.require(p.virtual_pipeline_size <= 1 || interleaved, |c| {
            format!(
                "{} virtual stages per stage ({}) need pipeline_schedule = interleaved",
                p.virtual_pipeline_size,
                c.origins
                    .of("num_layers_per_virtual_pipeline_stage")
                    .unwrap_or("virtual_pipeline_size")
            )
        });
        self.require(!interleaved || p.pipeline_model_parallel_size > 1, |c| {
            format!(
                "{} needs at least 2 stages, and {}",
                c.cite("pipeline_schedule", "interleaved"),
                c.cite("pipeline_model_parallel_size", p.pipeline_model_parallel_size)
            )
        });
        self.require(p.extra_warmup == 0 || p.schedule == ScheduleKind::OneFOneB, |c| {
            format!(
                "{} is for the 1f1b schedule, but {}; drop one of them",
                c.cite("pipeline_extra_warmup", p.extra_warmup),
                c.cite("pipeline_schedule", if interleaved { "interleaved" } else { "gpipe" })
            )
        });
        self.require(p.extra_warmup == 0 || p.pipeline_model_parallel_size > 1, |c| {
            format!(
                "{} has no effect without a pipeline, and {}; leave it out",
                c.cite("pipeline_extra_warmup", p.extra_warmup),
                c.cite("pipeline_model_parallel_size", p.pipeline_model_parallel_size)
            )
        });
        self.require(!p.delay_wgrad_compute || p.pipeline_model_parallel_size > 1, |c| {
            format!(
                "{} fills the time in which pipeline stages wait, so it has no effect with {}; leave it out",
                c.cite("delay_wgrad_compute", true),
                c.cite("pipeline_model_parallel_size", p.pipeline_model_parallel_size)
            )
        });
    }

    fn layers(&mut self, p: &ParallelConfig, num_layers: usize, num_virtual_stages: usize) {
        if let PartitionMethod::Type(regex) = &p.partition
            && let Err(why) = type_regex(regex)
        {
            self.problems.push(format!(
                "{} is no regular expression: {why}",
                self.cite("pipeline_partition", format_args!("type:{regex}"))
            ));
        }
        let stages = format!(
            "{} · {} virtual stages each",
            self.cite("pipeline_model_parallel_size", p.pipeline_model_parallel_size),
            p.virtual_pipeline_size
        );
        match &p.partition {
            PartitionMethod::Explicit(sizes) => {
                let cited = self.cite(
                    "pipeline_partition",
                    sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(","),
                );
                self.require(sizes.len() == num_virtual_stages, |_| {
                    format!(
                        "{cited} lists {} stages, but there are {num_virtual_stages} ({stages})",
                        sizes.len()
                    )
                });
                let sum = sizes.iter().try_fold(0_usize, |sum, size| sum.checked_add(*size));
                self.require(sum == Some(num_layers), |c| {
                    let dealt = sum.map_or("too many".to_string(), |sum| sum.to_string());
                    format!(
                        "{cited} distributes {dealt} layers, but {}",
                        c.cite("num_layers", num_layers)
                    )
                });
            }
            PartitionMethod::Uniform
            | PartitionMethod::Parameters
            | PartitionMethod::Flops
            | PartitionMethod::Type(_) => {
                self.require(num_layers >= num_virtual_stages, |c| {
                    format!(
                        "{} cannot fill {num_virtual_stages} stages ({stages}); use fewer stages, \
                         or list the layers of each stage with pipeline_partition",
                        c.cite("num_layers", num_layers)
                    )
                });
            }
        }
    }

    fn sharding(&mut self, p: &ParallelConfig) {
        self.require(p.zero_stage <= 3, |c| {
            format!("{} is not a stage of ZeRO, 0 to 3", c.cite("zero_stage", p.zero_stage))
        });
        self.require(p.param_offload == Offload::None || p.zero_stage == 3, |c| {
            let kind = if p.param_offload == Offload::Cpu { "cpu" } else { "nvme" };
            format!(
                "{} needs weights that are gathered when they are used; set zero_stage = 3, or leave it out",
                c.cite("offload_param", kind)
            )
        });
        let copies = p.num_distributed_optimizer_instances;
        self.positive("num_distributed_optimizer_instances", copies);
        let replicas = p.num_replicas();
        self.require(copies == 0 || replicas.is_multiple_of(copies), |c| {
            let sizes = [
                ("data_parallel_size", p.data_parallel_size),
                ("context_parallel_size", p.context_parallel_size),
            ];
            format!(
                "{} does not divide the {replicas} replicas, {}: every copy of the shards has as many ranks",
                c.cite("num_distributed_optimizer_instances", copies),
                c.cite_all(&sizes)
            )
        });
    }
}
