//! Checkpoints that are written while training continues.

use std::path::Path;

use megatron::config::{DynamicLossScale, LossScaling, Precision, RunConfig};
use system_tests::{
    Style, Tokens, context, layout, on_ranks, sources, tiny, train, train_from, trainer,
};

/// Names and bytes of the files in a folder.
fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let mut files: Vec<_> = entries
        .map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap()))
        .collect();
    files.sort();
    files
}

/// Runs with every kind of state: whole and sharded by ZeRO-1, fp32, split into halves, and with
/// fp32 master weights.
fn configs() -> Vec<RunConfig> {
    let mut configs = Vec::new();
    for precision in [
        Precision::Fp32,
        Precision::Bf16,
        Precision::Fp16(LossScaling::Dynamic(DynamicLossScale::default())),
    ] {
        for sharded in [false, true] {
            let mut config =
                context(layout(tiny(Style::Llama, 0.1), 2, 1, 2), if sharded { 2 } else { 1 });
            config.training.precision = precision;
            config.parallel.zero_stage = sharded.into();
            configs.push(config);
        }
    }
    configs
}

#[test]
fn steps_made_meanwhile_change_neither_the_checkpoint_nor_themselves() {
    for config in configs() {
        let what =
            format!("{:?}, ZeRO-1 {}", config.training.precision, config.parallel.zero_stage);
        let dirs = [0; 2].map(|_| tempfile::tempdir().unwrap());
        let data =
            sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length));
        let losses = on_ranks(config.parallel.world_size(), |world| {
            let mut trainer = trainer(&config, world, &data)?;
            let mut losses = Vec::new();
            for step in 0..6 {
                if step == 3 {
                    trainer.save(dirs[0].path())?;
                    trainer.begin_save(dirs[1].path())?;
                    let refused = trainer.save(dirs[0].path()).unwrap_err().to_string();
                    assert!(refused.contains("while another one is being written"), "{refused}");
                }
                losses.push(trainer.step()?.lm_loss);
            }
            assert_eq!(trainer.finish_save()?, Some(3));
            assert_eq!(trainer.finish_save()?, None);
            Ok(losses)
        })
        .unwrap()
        .remove(0);
        assert_eq!(losses, train(&config, 6).unwrap().losses, "{what}");
        let [at_once, meanwhile] = dirs.each_ref().map(|dir| dir.path().join("iter_0000003"));
        assert!(files(&at_once) == files(&meanwhile), "{what}");
        assert_eq!(train_from(&config, Some(&meanwhile), 3).unwrap().losses, losses[3..], "{what}");
    }
}
