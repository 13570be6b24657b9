//! The program, seen from outside.

mod async_save;
mod bad_input;
mod bench;
mod checkpoints;
mod clusters;
mod convert;
mod dead_rank;
mod folders;
mod hostfile;
mod inference;
mod inspect;
mod launch;
mod long_run;
mod meeting;
mod preprocess;
mod pretrain;
mod profile;
mod reshard;
mod restarts;
mod settings;
mod site;
mod support;
mod tensorboard;
mod terminal;
