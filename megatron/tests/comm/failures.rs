//! Errors of ranks when others disagree, fail, leave, or do not arrive.

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use megatron::Error;
use megatron::comm::ReduceOp;

use crate::support::{BACKENDS, bytes, ranks, tensor, try_ranks, zeros};

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn ranks_that_call_different_operations_are_told_both() {
    for backend in BACKENDS {
        let all = try_ranks(backend, 2, 10 * SECOND, |g| {
            let tp = g.split("tp", Some(0), 0)?.expect("a group");
            let result = match g.rank() {
                0 => tp.all_reduce(&tensor(0, 100, DType::F32), ReduceOp::Sum)?.wait(),
                _ => tp.all_gather(&tensor(1, 50, DType::F32), &zeros(100, DType::F32))?.wait(),
            };
            // Stay until both ranks have seen it.
            g.barrier()?;
            result
        });
        for result in all {
            let expected = "group tp (ranks 0,1): rank 0 called all_reduce #0 of f32×100, but rank 1 called all_gather #0 \
                            of f32×50; all ranks must issue the same operations in the same order";
            assert_eq!(result.unwrap_err().to_string(), expected, "{backend}");
        }
    }
}

#[test]
fn a_disagreement_about_anything_of_a_call_is_noticed() {
    for backend in BACKENDS {
        for case in 0..4 {
            let all = try_ranks(backend, 2, 10 * SECOND, |g| {
                let odd = g.rank() == 1;
                let result = match case {
                    0 => g
                        .all_reduce(&tensor(0, if odd { 7 } else { 8 }, DType::F32), ReduceOp::Sum)?
                        .wait(),
                    1 => g
                        .all_reduce(
                            &tensor(0, 8, if odd { DType::F16 } else { DType::BF16 }),
                            ReduceOp::Sum,
                        )?
                        .wait(),
                    2 => g
                        .all_reduce(
                            &tensor(0, 8, DType::F32),
                            if odd { ReduceOp::Max } else { ReduceOp::Sum },
                        )?
                        .wait(),
                    _ => g.broadcast(&tensor(0, 8, DType::F32), usize::from(odd))?.wait(),
                };
                if result.is_ok() {
                    // A rank that only sent finds the disagreement in its next operation.
                    return g.barrier();
                }
                result
            });
            assert!(
                all.iter().any(|r| matches!(r, Err(Error::Comm(_)))),
                "{backend} case {case}: {all:?}"
            );
        }
    }
}

#[test]
fn ranks_that_name_different_roots_are_told_both_at_once() {
    for backend in BACKENDS {
        for name in ["reduce", "gather", "broadcast"] {
            let start = Instant::now();
            let all = try_ranks(backend, 3, 60 * SECOND, |g| {
                // Rank 2 agrees with rank 0.
                let root = usize::from(g.rank() == 1);
                let t = tensor(0, 8, DType::F32);
                let result = match name {
                    "reduce" => g.reduce(&t, root, ReduceOp::Sum)?.wait(),
                    "gather" => g
                        .gather(&t, (g.rank() == root).then_some(&zeros(24, DType::F32)), root)?
                        .wait(),
                    _ => g.broadcast(&t, root)?.wait(),
                };
                // The root of a broadcast over messages only sends, so it finds the disagreement in
                // its next operation.
                result.and_then(|()| g.barrier())
            });
            let told = |result: &Result<(), Error>| match result {
                Err(Error::Comm(message)) => {
                    message.contains(&format!("rank 0 called {name} #"))
                        && message.contains("with root 0 of f32×8, but rank 1 called ")
                        && message.contains("with root 1")
                }
                _ => false,
            };
            assert!(
                name == "broadcast" && backend == "tcp" || told(&all[0]) && told(&all[1]),
                "{backend} {name}: {all:?}"
            );
            assert!(all.iter().all(Result::is_err), "{backend} {name}: {all:?}");
            assert!(start.elapsed() < 20 * SECOND, "{backend} {name}");
        }
    }
}

#[test]
fn a_group_that_failed_refuses_further_operations() {
    let all = try_ranks("threads", 2, 10 * SECOND, |g| {
        let t = tensor(0, 4 + g.rank(), DType::F32);
        g.all_reduce(&t, ReduceOp::Sum)?.wait().unwrap_err();
        g.barrier()
    });
    for result in all {
        assert!(result.unwrap_err().to_string().contains("cannot run after an earlier failure"));
    }
}

#[test]
fn a_received_message_of_another_shape_is_refused() {
    for backend in BACKENDS {
        let all = try_ranks(backend, 2, 10 * SECOND, |g| {
            if g.rank() == 0 {
                return g.send(&tensor(0, 50, DType::F32), 1, 4)?.wait();
            }
            g.recv(&zeros(100, DType::F32), 0, 4)?.wait()
        });
        let message = all[1].as_ref().unwrap_err().to_string();
        let expected = "rank 0 sent a message of f32×50 with tag 4, but rank 1 receives f32×100";
        assert!(message.contains(expected), "{backend}: {message}");
    }
}

#[test]
fn a_rank_that_leaves_is_named_to_those_who_need_it() {
    for backend in BACKENDS {
        let start = Instant::now();
        let all = try_ranks(backend, 3, 60 * SECOND, |g| {
            let dp = g.split("dp", Some(0), 0)?.expect("a group");
            if g.rank() == 2 { Ok(()) } else { dp.barrier() }
        });
        for result in &all[..2] {
            let Err(Error::PeerLost { rank: 2, how, operation }) = result else {
                panic!("{backend}: {result:?}")
            };
            assert_eq!(
                (how.as_str(), operation.as_str()),
                ("left the run", "barrier #0 on group dp (ranks 0,1,2)")
            );
        }
        assert!(start.elapsed() < 10 * SECOND, "{backend}");
    }
}

#[test]
fn messages_of_a_rank_that_left_can_still_be_received() {
    for backend in BACKENDS {
        ranks(backend, 2, |g| {
            if g.rank() == 0 {
                return g.send(&tensor(0, 5000, DType::F32), 1, 0)?.wait();
            }
            std::thread::sleep(Duration::from_millis(200));
            g.recv(&zeros(5000, DType::F32), 0, 0)?.wait()
        });
    }
}

#[test]
fn ranks_that_leave_with_unread_messages_do_not_wait_for_each_other() {
    for backend in BACKENDS {
        let start = Instant::now();
        ranks(backend, 2, |g| g.send(&zeros(2 << 20, DType::F32), 1 - g.rank(), 0)?.wait());
        assert!(start.elapsed() < 10 * SECOND, "{backend}");
    }
}

#[test]
fn a_large_message_outlives_its_sender() {
    for backend in BACKENDS {
        let all = ranks(backend, 2, |g| {
            let t = zeros(2 << 20, DType::F32);
            if g.rank() == 0 {
                g.send(&tensor(0, 2 << 20, DType::F32), 1, 0)?.wait()?;
                return Ok(vec![]);
            }
            std::thread::sleep(SECOND / 5);
            g.recv(&t, 0, 0)?.wait()?;
            Ok(bytes(&t))
        });
        assert!(all[1] == bytes(&tensor(0, 2 << 20, DType::F32)), "{backend}");
    }
}

#[test]
fn an_abort_reaches_every_rank_in_every_group() {
    for backend in BACKENDS {
        let start = Instant::now();
        let all = try_ranks(backend, 4, 60 * SECOND, |g| {
            let pair = g.split("dp", Some(g.rank() / 2), 0)?.expect("a group");
            match g.rank() {
                0 => {
                    g.abort("disk full");
                    pair.barrier()
                }
                1 => pair.barrier(),
                2 => pair.recv(&zeros(1, DType::U8), 1, 0)?.wait(),
                _ => g.barrier(),
            }
        });
        for result in all {
            let Err(Error::PeerLost { rank: 0, how, .. }) = &result else {
                panic!("{backend}: {result:?}")
            };
            assert_eq!(how, "failed: disk full", "{backend}");
        }
        assert!(start.elapsed() < 10 * SECOND, "{backend}");
    }
}

#[test]
fn a_rank_that_panics_does_not_hang_the_others() {
    let groups = megatron::comm::threads::world(2);
    let mut ranks = groups.into_iter().map(|g| {
        std::thread::spawn(move || {
            assert!(g.rank() == 0, "this rank panics, as the test wants");
            g.barrier()
        })
    });
    let (first, second) = (ranks.next().unwrap(), ranks.next().unwrap());
    assert!(second.join().is_err());
    let error = first.join().unwrap().unwrap_err();
    assert!(
        matches!(&error, Error::PeerLost { rank: 1, how, .. } if how.contains("panicked")),
        "{error}"
    );
}

#[test]
fn a_timeout_names_the_operation_and_every_missing_rank() {
    for backend in BACKENDS {
        let (late, patience) = (std::sync::Barrier::new(4), SECOND / 2);
        let all = try_ranks(backend, 4, patience, |g| {
            let dp = g.split("dp", Some(0), 0)?.expect("a group");
            let result = match g.rank() {
                1 | 3 => Ok(()),
                _ => dp.all_reduce(&tensor(0, 10, DType::F32), ReduceOp::Sum)?.wait(),
            };
            late.wait();
            result
        });
        let Err(Error::Timeout { operation, missing, seconds }) = &all[0] else {
            panic!("{backend}: {all:?}")
        };
        assert_eq!(operation, "all_reduce #0 of f32×10 on group dp (ranks 0,1,2,3)", "{backend}");
        assert_eq!(*missing, [1, 3], "{backend}");
        assert!((0.4..5.0).contains(seconds), "{backend}: {seconds}");
    }
}

#[test]
fn a_timeout_names_the_rank_that_hangs_and_not_one_that_waits_for_it() {
    for backend in ["local", "tcp"] {
        let late = std::sync::Barrier::new(3);
        let all = try_ranks(backend, 3, 3 * SECOND, |g| {
            // Rank 0 waits for 1, which waits for 2, which hangs.
            let result = match g.rank() {
                0 => g.recv(&zeros(1, DType::U8), 1, 0)?.wait(),
                1 => {
                    // Its deadline is later.
                    std::thread::sleep(SECOND);
                    g.recv(&zeros(1, DType::U8), 2, 0)?.wait()
                }
                _ => Ok(()),
            };
            late.wait();
            result
        });
        for result in &all[..2] {
            let Err(Error::Timeout { missing, .. }) = result else { panic!("{backend}: {all:?}") };
            assert_eq!(*missing, [2], "{backend}");
        }
    }
}

#[test]
fn unusable_arguments_are_refused_before_anything_is_sent() {
    let g = megatron::comm::solo();
    let t = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
    let refusals = [
        g.all_reduce(&t.t().unwrap(), ReduceOp::Sum),
        g.all_gather(&t, &zeros(5, DType::F32)),
        g.reduce_scatter(&t, &zeros(6, DType::F64), ReduceOp::Sum),
        g.all_to_all(&t, &zeros(5, DType::F32)),
        g.all_to_all(&t, &zeros(6, DType::F64)),
        g.broadcast(&t, 1),
        g.scatter(None, &t, 0),
        g.send(&t, 3, 0),
        g.all_reduce(&Tensor::zeros(1, DType::I16, &Device::Cpu).unwrap(), ReduceOp::Sum),
    ];
    for refusal in refusals {
        let Err(Error::Comm(message)) = refusal.and_then(|work| work.wait()) else {
            panic!("accepted")
        };
        assert!(message.contains("group world"), "{message}");
    }
}

#[test]
fn a_refusal_names_the_tensor_that_was_passed() {
    let world = megatron::comm::solo();
    let t = Tensor::zeros(6, DType::F32, &Device::Cpu).unwrap();
    let message = world.all_gather(&t, &t.narrow(0, 0, 3).unwrap()).err().unwrap().to_string();
    assert!(message.starts_with("all_gather of f32×6 on group"), "{message}");
    let message = world.broadcast(&t, 4).err().unwrap().to_string();
    assert!(message.starts_with("broadcast on group"), "{message}");
}
