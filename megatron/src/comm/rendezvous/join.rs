//! Agreement on the members of a run, through any store, even one with keys of an earlier run.
//!
//! Every rank writes a card with a fresh token. Rank 0 answers each card with a fresh nonce and the
//! token that it saw. A rank that finds its own token in the answer knows that the nonce belongs to
//! this run, and acknowledges it. When all ranks have acknowledged, rank 0 publishes the members.
//! All values are small, whatever the number of ranks, because a store limits its values.
//! Everything is sealed with the run's secret ([`Sealed`]). A rank whose card has another seal, or
//! none, is told why it is refused.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::sealed::{Found, Sealed};
use super::waiting::{Notify, Waiting, in_words};
use super::{Backend, RankInfo, Store};
use crate::comm::secret::{Mismatch, ONE_SECRET};
use crate::text::printable;
use crate::{Error, Result};

/// A rank's card: its description of itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Member {
    /// Random number, fresh for every start of a rank.
    pub token: u64,
    pub world_size: usize,
    pub backend: Backend,
    /// The machine's name.
    pub host: String,
    /// Equal for ranks that can share memory.
    pub identity: String,
    pub pid: u32,
    /// Addresses at which the rank listens for others, `host:port`, best first. Empty without a
    /// listener.
    pub addresses: Vec<String>,
}

/// Rank 0's answer to a card.
#[derive(Serialize, Deserialize)]
struct Welcome {
    nonce: u64,
    token: u64,
}

/// Rank 0's unsealed answer to a rank whose secret does not match: it is different, or only one
/// side has a secret.
#[derive(Serialize, Deserialize)]
struct Refusal {
    token: u64,
    why: String,
}

/// Members per value of the store. A value has room for this many with long names and addresses.
const PART: usize = 256;

impl Member {
    /// Whether both are on one machine and can see each other there.
    pub fn is_near(&self, other: &Self) -> bool {
        self.host == other.host && self.identity == other.identity
    }
}

/// Rank 0's decision.
#[derive(Serialize, Deserialize)]
enum Verdict {
    /// All ranks are there. The parts list the members.
    Complete,
    Refused(String),
    Missing {
        ranks: Vec<usize>,
        seconds: f64,
    },
}

/// A random number that no other start of a rank has.
pub(crate) fn fresh() -> u64 {
    // The standard library seeds this from the system's randomness.
    RandomState::new().hash_one((std::process::id(), Instant::now()))
}

fn card(rank: usize) -> String {
    format!("join/{rank}")
}

fn ack(nonce: u64, rank: usize) -> String {
    format!("{nonce:x}/ack/{rank}")
}

fn welcome(rank: usize) -> String {
    format!("welcome/{rank}")
}

fn refusal(rank: usize) -> String {
    format!("refused/{rank}")
}

/// The key with which a refused rank confirms that it read the reason.
fn heard(rank: usize) -> String {
    format!("heard/{rank}")
}

fn verdict(nonce: u64) -> String {
    format!("{nonce:x}/verdict")
}

/// The key of the members from `index * PART` on.
fn part(nonce: u64, index: usize) -> String {
    format!("{nonce:x}/members/{index}")
}

fn put(store: &dyn Store, key: &str, value: &impl Serialize) -> Result<()> {
    let text =
        serde_json::to_vec(value).map_err(|e| Error::comm(format!("rendezvous key {key}: {e}")))?;
    store.set(key, &text)
}

/// The value of `key`. `None` also if this version could not have written the value.
fn read<T: DeserializeOwned>(store: &dyn Store, key: &str) -> Result<Option<T>> {
    Ok(store.get(key)?.and_then(|text| serde_json::from_slice(&text).ok()))
}

fn put_members(store: &dyn Store, nonce: u64, members: &[Member]) -> Result<()> {
    members
        .chunks(PART)
        .enumerate()
        .try_for_each(|(index, members)| put(store, &part(nonce, index), &members))
}

/// The members of a world of `size`, in order of rank.
fn read_members(store: &dyn Store, nonce: u64, size: usize) -> Result<Vec<Member>> {
    let mut members = Vec::new();
    for index in 0..size.div_ceil(PART) {
        members.extend(read::<Vec<Member>>(store, &part(nonce, index))?.unwrap_or_default());
    }
    for member in &mut members {
        member.host = printable(&member.host);
        member.addresses.iter_mut().for_each(|address| *address = printable(&*address));
    }
    if members.len() == size {
        return Ok(members);
    }
    Err(Error::comm(format!(
        "rendezvous: rank 0 lists {} members, but the world has {size}",
        members.len()
    )))
}

/// A rank during the rendezvous.
struct Joining<'a> {
    store: &'a Sealed,
    info: &'a RankInfo,
    me: &'a Member,
    timeout: Duration,
    waiting: Waiting,
}

/// Announces this rank and returns the run's nonce and all members in order of rank. Calls `notify`
/// with the ranks that it waits for.
///
/// # Errors
/// If a rank does not appear in time (each is named), settings of ranks contradict each other, or
/// two processes have the same rank.
pub(crate) fn join(
    store: &Sealed,
    info: &RankInfo,
    me: Member,
    timeout: Duration,
    notify: Option<Notify>,
) -> Result<(u64, Vec<Member>)> {
    put(store, &card(info.rank), &me)?;
    let joining = Joining { store, info, me: &me, timeout, waiting: Waiting::new(notify) };
    let (nonce, verdict) = if info.rank == 0 { lead(joining)? } else { follow(joining)? };
    match verdict {
        Verdict::Complete => {
            let members = read_members(store, nonce, info.world_size)?;
            // Another process may have taken this rank just before the decision.
            if members[info.rank].token != me.token {
                return Err(Error::config(duplicate_rank(info, info.rank)));
            }
            Ok((nonce, members))
        }
        Verdict::Refused(why) => Err(Error::config(printable(why))),
        Verdict::Missing { ranks, seconds } => {
            Err(Error::Timeout { operation: "rendezvous".into(), missing: ranks, seconds })
        }
    }
}

fn duplicate_rank(info: &RankInfo, rank: usize) -> String {
    let name = info.variables.rank;
    format!(
        "rendezvous: another process also joined as {name}={rank}; give every process a different {name}"
    )
}

fn lead(joining: Joining) -> Result<(u64, Verdict)> {
    let Joining { store, info, me, timeout, mut waiting } = joining;
    let (start, nonce) = (Instant::now(), fresh());
    // The tokens of ranks that were answered.
    let mut welcomed = BTreeMap::new();
    let mut foreign = ForeignProcesses::default();
    // The tokens of ranks that have acknowledged, all of this run.
    let mut answered = BTreeMap::from([(0, me.token)]);
    let ruling = super::store::poll(timeout, || {
        let mut cards: BTreeMap<usize, Member> = BTreeMap::new();
        for key in store.list("join/")? {
            let rank = key.strip_prefix("join/").and_then(|rank| rank.parse::<usize>().ok());
            let Some(rank) = rank else { continue };
            match store.look(&key)? {
                Found::Ours(card) => {
                    cards.extend(serde_json::from_slice(&card).ok().map(|member| (rank, member)))
                }
                Found::Strange(mismatch, card) => foreign.refuse(store, rank, mismatch, &card)?,
                Found::Nothing => {}
            }
        }
        foreign.listen(store, &waiting)?;
        for (&rank, &Member { token, .. }) in &cards {
            if welcomed.insert(rank, token) != Some(token) {
                put(store, &welcome(rank), &Welcome { nonce, token })?;
            }
        }
        // Reported after the answer, through which the second process also learns of it.
        let replaced = answered
            .iter()
            .find(|(rank, token)| welcomed.get(*rank).is_some_and(|there| there != *token));
        if let Some((rank, _)) = replaced {
            return Ok(Some(Verdict::Refused(duplicate_rank(info, *rank))));
        }
        // Only ranks that have acknowledged belong to this run; other cards may be old.
        let mut members = BTreeMap::new();
        for (rank, member) in cards {
            if rank == 0 || read::<u64>(store, &ack(nonce, rank))? == Some(member.token) {
                answered.insert(rank, member.token);
                members.insert(rank, member);
            }
        }
        for (rank, member) in &members {
            if member.world_size != info.world_size {
                return Ok(Some(Verdict::Refused(format!(
                    "rendezvous: rank 0 was started with {name}={}, but rank {rank} with \
                     {name}={}; start all ranks with the same value",
                    info.world_size,
                    member.world_size,
                    name = info.variables.world_size
                ))));
            }
            if member.backend != me.backend {
                return Ok(Some(Verdict::Refused(format!(
                    "rendezvous: rank 0 was started with --distributed-backend {}, but rank {rank} \
                     with {}; start all ranks with the same backend",
                    me.backend, member.backend
                ))));
            }
        }
        if members.len() != info.world_size {
            waiting.notify(|| {
                let missing: Vec<usize> =
                    (0..info.world_size).filter(|rank| !members.contains_key(rank)).collect();
                format!(
                    "rank 0 is waiting for {} of {} ranks: {}",
                    missing.len(),
                    info.world_size,
                    in_words(&missing)
                )
            });
            return Ok(None);
        }
        put_members(store, nonce, &members.into_values().collect::<Vec<_>>())?;
        Ok(Some(Verdict::Complete))
    })?;
    let ruling = match ruling {
        Some(ruling) => ruling,
        None => {
            let mut ranks = Vec::new();
            for rank in 1..info.world_size {
                if read::<u64>(store, &ack(nonce, rank))?.is_none() {
                    ranks.push(rank);
                }
            }
            Verdict::Missing { ranks, seconds: start.elapsed().as_secs_f64() }
        }
    };
    put(store, &verdict(nonce), &ruling)?;
    Ok((nonce, ruling))
}

/// Processes whose cards do not have this run's seal: processes of another run, or cards that an
/// earlier run left in a folder.
#[derive(Default)]
struct ForeignProcesses {
    /// The tokens of the refused processes, and the reasons.
    refused: BTreeMap<usize, (u64, Mismatch)>,
    /// Whether a refused process has confirmed the refusal, which an old card never does, and this
    /// was reported here.
    told: bool,
}

impl ForeignProcesses {
    fn refuse(&mut self, store: &Sealed, rank: usize, how: Mismatch, card: &[u8]) -> Result<()> {
        let Ok(Member { token, .. }) = serde_json::from_slice(card) else { return Ok(()) };
        if self.refused.insert(rank, (token, how)) == Some((token, how)) {
            return Ok(());
        }
        let why =
            format!("rendezvous: rank 0 refuses rank {rank}: {}; {ONE_SECRET}", how.reversed());
        put(store.open(), &refusal(rank), &Refusal { token, why })
    }

    /// Reports a refused process, once it has confirmed and is thus known to be alive.
    fn listen(&mut self, store: &Sealed, waiting: &Waiting) -> Result<()> {
        for (&rank, &(token, how)) in self.refused.iter().filter(|_| !self.told) {
            if read::<u64>(store.open(), &heard(rank))? == Some(token) {
                self.told = true;
                waiting.say(&format!(
                    "a process that tried to join as rank {rank} was refused: {how}; {ONE_SECRET}"
                ));
                break;
            }
        }
        Ok(())
    }
}

fn follow(joining: Joining) -> Result<(u64, Verdict)> {
    let Joining { store, info, me, timeout, mut waiting } = joining;
    let start = Instant::now();
    let mut joined = None;
    let ruling = super::store::poll(timeout, || {
        // Checked before the card, which may be replaced after the decision.
        if let Some(nonce) = joined
            && let Some(ruling) = read::<Verdict>(store, &verdict(nonce))?
        {
            return Ok(Some((nonce, ruling)));
        }
        let there: Option<Member> = read(store, &card(info.rank))?;
        if there.is_some_and(|there| there.token != me.token) {
            return Err(Error::config(duplicate_rank(info, info.rank)));
        }
        let refusal: Option<Refusal> = read(store.open(), &refusal(info.rank))?;
        if let Some(Refusal { why, .. }) = refusal.filter(|there| there.token == me.token) {
            put(store.open(), &heard(info.rank), &me.token)?;
            return Err(Error::config(printable(why)));
        }
        // From now on rank 0 reports the missing ranks.
        if joined.is_some() {
            return Ok(None);
        }
        waiting.notify(|| format!("rank {} is waiting for rank 0", info.rank));
        let there: Option<Welcome> = read(store, &welcome(info.rank))?;
        if let Some(Welcome { nonce, .. }) = there.filter(|there| there.token == me.token) {
            put(store, &ack(nonce, info.rank), &me.token)?;
            joined = Some(nonce);
        }
        Ok(None)
    })?;
    if let Some(ruling) = ruling {
        return Ok(ruling);
    }
    let present = store.list("join/")?;
    let mut ranks: Vec<usize> =
        (0..info.world_size).filter(|rank| !present.contains(&card(*rank))).collect();
    if ranks.is_empty() {
        // All ranks have left a card, but rank 0 has not answered this one.
        ranks.push(0);
    }
    Ok((0, Verdict::Missing { ranks, seconds: start.elapsed().as_secs_f64() }))
}

#[cfg(test)]
mod tests {
    use super::super::{Clients, FileStore, StoreServer, TcpStore};
    use super::*;
    use crate::comm::secret::Secret;

    fn sealed(store: impl Store + 'static) -> Sealed {
        Sealed::new(Box::new(store), Secret::default())
    }

    fn member(token: u64) -> Member {
        let (host, identity) = ("here".into(), "here".into());
        Member {
            token,
            world_size: 2,
            backend: Backend::Auto,
            host,
            identity,
            pid: 1,
            addresses: vec![],
        }
    }

    #[test]
    fn a_rank_whose_place_went_to_another_process_does_not_take_part() {
        let dir = tempfile::tempdir().unwrap();
        let store = sealed(FileStore::open(dir.path()).unwrap());
        let info = RankInfo { rank: 1, world_size: 2, ..RankInfo::alone() };
        // The other process's card, acknowledgement and verdict came between two checks of this
        // rank.
        put(&store, &welcome(1), &Welcome { nonce: 7, token: 11 }).unwrap();
        put_members(&store, 7, &[member(10), member(12)]).unwrap();
        put(&store, &verdict(7), &Verdict::Complete).unwrap();
        let Err(Error::Config(message)) =
            join(&store, &info, member(11), Duration::from_secs(5), None)
        else {
            panic!()
        };
        assert!(message.contains("another process also joined as RANK=1"), "{message}");
    }

    #[test]
    fn thousands_of_ranks_meet() {
        const SIZE: usize = 6000;
        let server = StoreServer::bind("127.0.0.1", 0, Clients::default()).unwrap();
        let (port, secret) = (server.address().port(), Secret::default());
        let connect = || {
            sealed(
                TcpStore::connect("127.0.0.1", port, Duration::from_secs(5), &secret, None)
                    .unwrap(),
            )
        };
        let card_of = |rank: usize| Member {
            world_size: SIZE,
            host: format!("worker-{rank}.training.svc.cluster.local"),
            identity: "f3c1a1de-5f0b-4a55-8a1c-0f4b8f0d7a11 pid:[4026531836]".into(),
            addresses: ["10.120.200.100", "fd00:1234:5678:9abc:def0::1", "127.0.0.1"]
                .map(|ip| format!("{ip} 40000"))
                .into(),
            ..member(rank as u64)
        };
        let join = |rank: usize| {
            let info = RankInfo { rank, world_size: SIZE, ..RankInfo::alone() };
            join(&connect(), &info, card_of(rank), Duration::from_secs(120), None).unwrap()
        };
        let (first, last) = std::thread::scope(|scope| {
            let ends = [0, SIZE - 1].map(|rank| scope.spawn(move || join(rank)));
            // One thread writes the cards of all other ranks, and acknowledges for them.
            let store = connect();
            (1..SIZE - 1).for_each(|rank| put(&store, &card(rank), &card_of(rank)).unwrap());
            for rank in 1..SIZE - 1 {
                let ready = || read::<Welcome>(&store, &welcome(rank));
                let Welcome { nonce, token } =
                    super::super::store::poll(Duration::from_secs(60), ready).unwrap().unwrap();
                put(&store, &ack(nonce, rank), &token).unwrap();
            }
            let [first, last] = ends.map(|rank| rank.join().unwrap());
            (first, last)
        });
        assert_eq!(first.0, last.0);
        for (_, members) in [first, last] {
            assert!(members.iter().map(|member| member.token).eq(0..SIZE as u64));
        }
    }
}
