//! Authentication of a run's processes: a secret that the ranks share, and proofs made with it
//! (HMAC-SHA256, RFC 2104).
//!
//! A proof covers everything that both sides of a connection sent, including a random challenge
//! from each. An overheard proof is therefore useless on any other connection.

use std::fmt;
use std::io::{self, Read, Write};
use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::{Error, Result};

/// The variable that passes a run's secret to its ranks.
pub const RUN_SECRET: &str = "MEGATRON_RUN_SECRET";
/// Minimum number of characters. As hexadecimal digits they have more bits than anyone can try.
const SHORTEST: usize = 32;
/// Bytes of a proof and of a challenge.
pub(crate) const PROOF: usize = 32;

/// A run's secret, or none if the ranks were started without one.
#[derive(Clone, Default)]
pub struct Secret(Option<Arc<str>>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(if self.is_none() { "no secret" } else { "a secret" })
    }
}

/// How the peer's secret differs from this side's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mismatch {
    /// The peer has no secret.
    Lacking,
    /// This side has no secret.
    Unexpected,
    /// Both have one, but they differ.
    Different,
}

impl Mismatch {
    /// The mismatch as seen from the other side.
    pub fn reversed(self) -> Self {
        match self {
            Self::Lacking => Self::Unexpected,
            Self::Unexpected => Self::Lacking,
            Self::Different => Self::Different,
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Lacking => "it has no MEGATRON_RUN_SECRET, but this process has one",
            Self::Unexpected => "it has a MEGATRON_RUN_SECRET, but this process has none",
            Self::Different => "its MEGATRON_RUN_SECRET differs from this process's",
        })
    }
}

impl std::error::Error for Mismatch {}

impl From<Mismatch> for io::Error {
    fn from(mismatch: Mismatch) -> Self {
        Self::new(io::ErrorKind::PermissionDenied, mismatch)
    }
}

/// The mismatch in an error of [`introduce`] or [`recognize`], if there is one.
pub(crate) fn mismatch(error: &io::Error) -> Option<Mismatch> {
    error.get_ref()?.downcast_ref().copied()
}

/// Advice for a mismatch.
pub(crate) const ONE_SECRET: &str = "give all ranks the same secret, or give no rank a secret";

fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

impl Secret {
    /// Creates a new secret: 64 hexadecimal digits from the system's random number generator.
    ///
    /// # Errors
    /// If the system provides no random numbers.
    pub fn new() -> Result<Self> {
        let bytes = random::<32>()
            .map_err(|e| Error::comm(format!("cannot create a secret for the run: {e}")))?;
        let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self(Some(digits.into())))
    }

    /// The secret in `text`.
    ///
    /// # Errors
    /// If it is too short, for example empty because the command that should have created it
    /// failed.
    pub fn parse(text: &str) -> Result<Self> {
        let text = text.trim();
        let remedy = format!("`export {RUN_SECRET}=$(openssl rand -hex 32)`, or unset it");
        if text.len() < SHORTEST {
            let length = text.len();
            return Err(Error::config(format!(
                "{RUN_SECRET} has {length} characters, but a secret needs at least {SHORTEST}; use {remedy}"
            )));
        }
        if text.contains(|c: char| c.is_whitespace() || c.is_control()) {
            return Err(Error::config(format!(
                "{RUN_SECRET} contains a space or a control character; use {remedy}"
            )));
        }
        Ok(Self(Some(text.into())))
    }

    /// The secret in [`RUN_SECRET`], read through `lookup`; none if the variable is not set.
    ///
    /// # Errors
    /// As [`Secret::parse`].
    pub fn from_env(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        lookup(RUN_SECRET).map_or(Ok(Self::default()), |text| Self::parse(&text))
    }

    /// Whether there is no secret.
    pub fn is_none(&self) -> bool {
        self.0.is_none()
    }

    /// The text of the secret, for passing it on where no other user sees it.
    pub fn reveal(&self) -> Option<&str> {
        self.0.as_deref()
    }

    /// The MAC of `parts`, for `purpose`. Without a secret anyone can compute it.
    fn mac(&self, purpose: &str, parts: &[&[u8]]) -> Hmac<Sha256> {
        // HMAC accepts keys of any length, so this cannot fail.
        let key = self.0.as_deref().unwrap_or_default().as_bytes();
        let mut mac =
            Hmac::<Sha256>::new_from_slice(key).unwrap_or_else(|_| Hmac::new(&Default::default()));
        for part in [purpose.as_bytes()].iter().chain(parts) {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }

    pub(crate) fn proof(&self, purpose: &str, parts: &[&[u8]]) -> [u8; PROOF] {
        self.mac(purpose, parts).finalize().into_bytes().into()
    }

    /// Whether `proof` is the proof of `parts`, in constant time.
    pub(crate) fn verify(&self, purpose: &str, parts: &[&[u8]], proof: &[u8]) -> bool {
        self.mac(purpose, parts).verify_slice(proof).is_ok()
    }

    fn compare(&self, they_have: bool) -> std::result::Result<(), Mismatch> {
        match (self.is_none(), they_have) {
            (false, false) => Err(Mismatch::Lacking),
            (true, true) => Err(Mismatch::Unexpected),
            _ => Ok(()),
        }
    }
}

const CALLER: &str = "megatron connection: caller";
const ANSWERER: &str = "megatron connection: answerer";

fn read_array<const N: usize>(from: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// The caller's part of a new connection. It sends `greeting`, reads the peer's greeting with
/// `hear`, which returns the expected one, and both sides prove that they have the same secret.
///
/// # Errors
/// Those of `hear` and the connection; a [`Mismatch`], which the peer then finds, too.
pub(crate) fn introduce<S: Read + Write>(
    stream: &mut S,
    secret: &Secret,
    greeting: &[u8],
    hear: impl FnOnce(&mut S) -> io::Result<Vec<u8>>,
) -> io::Result<()> {
    let (mine, challenge) = ([u8::from(!secret.is_none())], random::<PROOF>()?);
    stream.write_all(&[greeting, &mine, &challenge].concat())?;
    let heard = hear(stream)?;
    let theirs: [u8; 1] = read_array(stream)?;
    let (answer, proof): ([u8; PROOF], [u8; PROOF]) = (read_array(stream)?, read_array(stream)?);
    let said: [&[u8]; 6] = [greeting, &mine, &challenge, &heard, &theirs, &answer];
    // Sent in any case, so that the peer learns the cause, too.
    stream.write_all(&secret.proof(CALLER, &said))?;
    secret.compare(theirs == [1])?;
    if !secret.verify(ANSWERER, &said, &proof) {
        return Err(Mismatch::Different.into());
    }
    Ok(())
}

/// A caller that has sent its greeting and was answered.
pub(crate) struct Answered {
    said: Vec<Vec<u8>>,
}

/// The answerer's part, up to the caller's proof. `hear` reads the caller's greeting and returns it
/// with the answer.
///
/// # Errors
/// Those of `hear` and the connection.
pub(crate) fn answer<S: Read + Write>(
    stream: &mut S,
    secret: &Secret,
    hear: impl FnOnce(&mut S) -> io::Result<(Vec<u8>, Vec<u8>)>,
) -> io::Result<Answered> {
    let (heard, greeting) = hear(stream)?;
    let theirs: [u8; 1] = read_array(stream)?;
    let challenge: [u8; PROOF] = read_array(stream)?;
    let said = vec![
        heard,
        theirs.to_vec(),
        challenge.to_vec(),
        greeting,
        vec![u8::from(!secret.is_none())],
        random::<PROOF>()?.to_vec(),
    ];
    let proof = secret.proof(ANSWERER, &said.iter().map(Vec::as_slice).collect::<Vec<_>>());
    stream.write_all(&[said[3..].concat(), proof.to_vec()].concat())?;
    Ok(Answered { said })
}

impl Answered {
    /// Reads the caller's proof, which also confirms that the caller received the answer.
    ///
    /// # Errors
    /// Those of the connection; a [`Mismatch`].
    pub fn recognize(&self, stream: &mut impl Read, secret: &Secret) -> io::Result<()> {
        let proof: [u8; PROOF] = read_array(stream)?;
        secret.compare(self.said[1] == [1])?;
        if !secret.verify(CALLER, &self.said.iter().map(Vec::as_slice).collect::<Vec<_>>(), &proof)
        {
            return Err(Mismatch::Different.into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn secret(text: &str) -> Secret {
        Secret::parse(&text.repeat(SHORTEST)).unwrap()
    }

    /// The results of the caller and of the answerer.
    fn meet(caller: &Secret, answerer: &Secret) -> [io::Result<()>; 2] {
        let (mut here, mut there) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let called = scope.spawn(move || {
                introduce(&mut here, caller, b"call", |s| read_array::<4>(s).map(Into::into))
            });
            let hear = |s: &mut UnixStream| Ok((read_array::<4>(s)?.to_vec(), b"back".to_vec()));
            let answered =
                answer(&mut there, answerer, hear).and_then(|a| a.recognize(&mut there, answerer));
            [called.join().unwrap(), answered]
        })
    }

    #[test]
    fn those_with_one_secret_or_both_without_recognize_each_other() {
        for [a, b] in [[secret("a"), secret("a")], [Secret::default(), Secret::default()]] {
            assert!(meet(&a, &b).iter().all(|result| result.is_ok()));
        }
    }

    #[test]
    fn both_sides_learn_how_their_secrets_differ() {
        let none = Secret::default();
        for (caller, answerer, seen_by_caller) in [
            (secret("a"), secret("b"), Mismatch::Different),
            (secret("a"), none.clone(), Mismatch::Lacking),
            (none, secret("a"), Mismatch::Unexpected),
        ] {
            let seen = meet(&caller, &answerer).map(|result| mismatch(&result.unwrap_err()));
            assert_eq!(seen, [Some(seen_by_caller), Some(seen_by_caller.reversed())]);
        }
    }

    #[test]
    fn what_was_overheard_of_a_caller_proves_nothing_to_another_answerer() {
        let (secret, said) = (secret("a"), |challenge: u8| {
            vec![vec![1], vec![1], vec![7; PROOF], vec![2], vec![1], vec![challenge; PROOF]]
        });
        let parts = |said: &[Vec<u8>]| {
            said.iter().map(Vec::as_slice).map(<[u8]>::to_vec).collect::<Vec<_>>()
        };
        let overheard =
            secret.proof(CALLER, &parts(&said(1)).iter().map(Vec::as_slice).collect::<Vec<_>>());
        assert!(Answered { said: said(1) }.recognize(&mut &overheard[..], &secret).is_ok());
        assert!(Answered { said: said(2) }.recognize(&mut &overheard[..], &secret).is_err());
        // The answerer's own proof, sent back, does not help either.
        let own =
            secret.proof(ANSWERER, &parts(&said(1)).iter().map(Vec::as_slice).collect::<Vec<_>>());
        assert!(Answered { said: said(1) }.recognize(&mut &own[..], &secret).is_err());
    }

    #[test]
    fn a_secret_is_a_long_word_and_is_not_printed() {
        let two_lines = format!("{0}\n{0}", "a".repeat(SHORTEST));
        for bad in ["", " ", "0123456789abcdef", &two_lines] {
            let message = Secret::from_env(|_| Some(bad.into())).unwrap_err().to_string();
            assert!(message.contains(RUN_SECRET) && message.contains("openssl rand"), "{message}");
        }
        let fresh = Secret::new().unwrap();
        assert_ne!(fresh.reveal(), Secret::new().unwrap().reveal());
        assert!(!format!("{fresh:?}").contains(fresh.reveal().unwrap()));
        assert!(Secret::from_env(|_| None).unwrap().is_none());
    }
}
