//! Communication between ranks: every collective on every backend against a serial oracle, bit for
//! bit; and disagreement, loss and delays of ranks.

mod collectives;
mod direct;
mod failures;
mod processes;
mod rendezvous;
mod support;
mod windows;
