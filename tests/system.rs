//! Tests of the whole system.

mod arrows;
mod bitwise;
mod book;
mod custom_models;
mod cycled_momentum;
mod documents;
mod families;
mod generate;
mod gradients;
mod layouts;
mod megatron_core;
mod moments;
mod offload;
mod oracle;
mod precision;
mod rampup;
mod random;
mod reshard;
mod resume;
mod saving;
mod timers;
