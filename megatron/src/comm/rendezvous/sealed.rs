//! A store whose values are authenticated with the run's secret. Messages through a folder are thus
//! as trustworthy as messages through a connection.

use std::time::{Duration, Instant};

use super::Store;
use super::store::poll;
use crate::Result;
use crate::comm::secret::{Mismatch, PROOF, Secret};

/// Prefix of a sealed value. A proof and the value itself follow.
const SEAL: &[u8; 8] = b"MGTSEAL1";
const PURPOSE: &str = "megatron rendezvous";

/// Seals values on writing, and ignores values with another seal. Without a secret it does neither.
pub(crate) struct Sealed {
    store: Box<dyn Store>,
    secret: Secret,
}

/// The content of a key.
pub(crate) enum Found {
    Nothing,
    Ours(Vec<u8>),
    /// The value of a process whose secret does not match: it is different, or only one side has a
    /// secret.
    Strange(Mismatch, Vec<u8>),
}

impl Sealed {
    pub fn new(store: Box<dyn Store>, secret: Secret) -> Self {
        Self { store, secret }
    }

    /// The unsealed store, for messages to processes with other secrets.
    pub fn open(&self) -> &dyn Store {
        &*self.store
    }

    pub fn look(&self, key: &str) -> Result<Found> {
        let Some(value) = self.store.get(key)? else { return Ok(Found::Nothing) };
        let sealed = value.strip_prefix(SEAL).and_then(|sealed| sealed.split_at_checked(PROOF));
        Ok(match (sealed, self.secret.is_none()) {
            (None, true) => Found::Ours(value),
            (None, false) => Found::Strange(Mismatch::Lacking, value),
            (Some((_, inside)), true) => Found::Strange(Mismatch::Unexpected, inside.to_vec()),
            (Some((proof, inside)), false)
                if self.secret.verify(PURPOSE, &[key.as_bytes(), inside], proof) =>
            {
                Found::Ours(inside.to_vec())
            }
            (Some((_, inside)), false) => Found::Strange(Mismatch::Different, inside.to_vec()),
        })
    }
}

impl Store for Sealed {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        if self.secret.is_none() {
            return self.store.set(key, value);
        }
        let proof = self.secret.proof(PURPOSE, &[key.as_bytes(), value]);
        self.store.set(key, &[SEAL, &proof[..], value].concat())
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        match self.look(key)? {
            Found::Ours(value) => Ok(Some(value)),
            Found::Nothing | Found::Strange(..) => Ok(None),
        }
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.store.add(key, amount)
    }

    fn list(&self, prefix: &str) -> Result<Vec<String>> {
        self.store.list(prefix)
    }

    fn close(&self) -> Result<()> {
        self.store.close()
    }

    fn wait(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>> {
        let deadline = Instant::now() + timeout;
        self.store.wait(key, timeout)?;
        poll(deadline.saturating_duration_since(Instant::now()), || self.get(key))
    }
}

#[cfg(test)]
mod tests {
    use super::super::FileStore;
    use super::*;

    #[test]
    fn values_of_other_secrets_and_of_other_keys_are_as_if_they_were_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let store = |secret: Option<&str>| {
            let secret = secret
                .map_or_else(Secret::default, |text| Secret::parse(&text.repeat(32)).unwrap());
            Sealed::new(Box::new(FileStore::open(dir.path()).unwrap()), secret)
        };
        let (a, b, none) = (store(Some("a")), store(Some("b")), store(None));
        a.set("k", b"v").unwrap();
        assert_eq!(
            [&a, &b, &none].map(|store| store.get("k").unwrap()),
            [Some(b"v".to_vec()), None, None]
        );
        assert!(
            matches!(b.look("k").unwrap(), Found::Strange(Mismatch::Different, value) if value == b"v")
        );
        assert!(
            matches!(none.look("k").unwrap(), Found::Strange(Mismatch::Unexpected, value) if value == b"v")
        );
        none.set("plain", b"v").unwrap();
        assert!(
            matches!(a.look("plain").unwrap(), Found::Strange(Mismatch::Lacking, value) if value == b"v")
        );
        // A value copied from one key to another.
        a.open().set("l", &a.open().get("k").unwrap().unwrap()).unwrap();
        assert_eq!(a.get("l").unwrap(), None);
    }
}
