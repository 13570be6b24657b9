//! The program, seen from outside.

mod bench;
mod launch;
mod pretrain;
mod settings;
mod support;
