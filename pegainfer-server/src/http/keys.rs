//! API keys: their sources, how callers send them, and the rates of each.

use super::secret_file;
use crate::allowed::Allowed;
use crate::rates::{Meter, Rates};
use anyhow::{Context, Result, anyhow, bail, ensure};
use axum::http::HeaderMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use subtle::ConstantTimeEq;

/// A value that is never logged or printed.
#[derive(Clone)]
pub struct Secret(pub String);

impl From<String> for Secret {
    fn from(value: String) -> Self {
        Self(value)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// API keys and their sources. Callers must send one of them. Clones share the keys, which can be reloaded.
#[derive(Clone, Default)]
pub struct ApiKeys(Arc<Source>);

#[derive(Default)]
struct Source {
    given: Vec<Secret>,
    /// Name of the flag, and path of a file with one key per line.
    file: Option<(&'static str, PathBuf)>,
    keys: RwLock<Arc<Vec<Key>>>,
}

/// One key.
#[derive(Clone)]
pub(super) struct Key {
    /// The text that the caller sends.
    pub text: String,
    /// Meter of the key's rates, if it has rates.
    pub meter: Option<Arc<Meter>>,
    /// The models and adapters that it may use.
    pub allowed: Allowed,
}

impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ApiKeys({})", self.keys().len())
    }
}

impl ApiKeys {
    /// Loads the keys of the command line and of a file with one key per line. Errors never show a key.
    pub fn load(given: &[Secret], file: Option<&Path>) -> Result<Self> {
        Self::load_with("--api-key-file", given, file)
    }

    /// Like [`load`](Self::load), for keys of admins.
    pub fn load_admin(given: &[Secret], file: Option<&Path>) -> Result<Self> {
        Self::load_with("--admin-key-file", given, file)
    }

    fn load_with(flag: &'static str, given: &[Secret], file: Option<&Path>) -> Result<Self> {
        let file = file.map(|path| (flag, path.to_path_buf()));
        let keys = Self(Arc::new(Source { given: given.to_vec(), file, keys: RwLock::default() }));
        keys.reload()?;
        Ok(keys)
    }

    /// Reads the file again. On an error the keys stay as they are. A key with unchanged rates keeps its meter.
    pub fn reload(&self) -> Result<()> {
        let given = |secret: &Secret| Line { text: secret.0.clone(), ..Line::default() };
        let mut lines: Vec<Line> = self.0.given.iter().map(given).collect();
        if let Some((flag, path)) = &self.0.file {
            let unreadable = || format!("{flag} {} cannot be read", path.display());
            let bytes = secret_file::read(path).with_context(unreadable)?;
            // The bytes are not shown, because they may be part of a key.
            let text = String::from_utf8(bytes).map_err(|_| anyhow!("it is not UTF-8")).with_context(unreadable)?;
            let before = lines.len();
            for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
                let parsed = parse_line(line);
                lines.push(parsed.with_context(|| format!("line {} of {flag} {}", number + 1, path.display()))?);
            }
            ensure!(lines.len() > before, "{flag} {} has no key: put one on each line", path.display());
            warn_if_readable_by_others(flag, path);
        }
        let sendable = |key: &str| !key.is_empty() && key.bytes().all(|b| b.is_ascii_graphic());
        ensure!(
            lines.iter().all(|line| sendable(&line.text)),
            "an API key must be one or more ASCII characters without spaces"
        );
        let key = |Line { text, rates, allowed }| Key { meter: self.meter(&text, rates), text, allowed };
        let keys = lines.into_iter().map(key).collect();
        *self.0.keys.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(keys);
        Ok(())
    }

    /// The meter of a key: the existing one, if its rates are the same.
    fn meter(&self, text: &str, rates: Rates) -> Option<Arc<Meter>> {
        if rates == Rates::default() {
            return None;
        }
        let keys = self.keys();
        let old = keys.iter().filter(|key| key.text == text).find_map(|key| key.meter.clone());
        Some(old.filter(|meter| meter.rates() == rates).unwrap_or_else(|| Arc::new(Meter::new(rates))))
    }

    /// True if there are no keys.
    pub fn is_empty(&self) -> bool {
        self.keys().is_empty()
    }

    fn keys(&self) -> Arc<Vec<Key>> {
        self.0.keys.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The key that the caller sent, if it is known. The comparison takes the same time for every wrong key of the same
    /// length. A key that is given twice has the rates of the file.
    pub(super) fn find(&self, sent: Option<&str>) -> Option<Key> {
        let sent = sent?.trim().as_bytes();
        let found = |found, key: &Key| if key.text.as_bytes().ct_eq(sent).into() { Some(key.clone()) } else { found };
        self.keys().iter().fold(None, found)
    }
}

/// A line of a key file.
#[derive(Default)]
struct Line {
    text: String,
    rates: Rates,
    allowed: Allowed,
}

/// A line of a key file: a key, its rates such as `rpm=60 tpm=100000`, and the models and adapters that it may use, such
/// as `models=small,large adapters=sql,support`.
fn parse_line(line: &str) -> Result<Line> {
    let mut words = line.split_whitespace();
    let (key, mut rates) = (words.next().unwrap_or_default().to_string(), Rates::default());
    let mut allowed = Allowed::default();
    for word in words {
        let (name, number) = word.split_once('=').unwrap_or((word, ""));
        let names = match name {
            "models" => Some(&mut allowed.models),
            "adapters" => Some(&mut allowed.adapters),
            _ => None,
        };
        if let Some(names) = names {
            ensure!(names.is_none(), "{name} is given twice");
            *names = Some(number.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect());
            continue;
        }
        let rate = match name {
            "rpm" => &mut rates.requests,
            "tpm" => &mut rates.tokens,
            // The rest is not shown: it may be part of a key.
            _ => bail!(
                "after its key, a line may have only rpm=N (requests a minute), tpm=N (tokens a minute), \
                 models=NAME,NAME and adapters=NAME,NAME (LoRA adapters)"
            ),
        };
        ensure!(rate.is_none(), "{name} is given twice");
        let number = number.replace('_', "");
        *rate = Some(number.parse().ok().with_context(|| format!("{name} must be a number from 1 to {}", u32::MAX))?);
    }
    Ok(Line { text: key, rates, allowed })
}

/// The key that the caller sent.
pub(super) fn sent_key(headers: &HeaderMap) -> Option<&str> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let bearer = text("authorization").and_then(|value| value.split_once(' '));
    let bearer = bearer.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")).map(|(_, key)| key);
    // Anthropic's clients send the key in this header.
    bearer.or(text("x-api-key"))
}

#[cfg(unix)]
fn warn_if_readable_by_others(flag: &str, path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    if std::fs::metadata(path).is_ok_and(|file| file.permissions().mode() & 0o004 != 0) {
        log::warn!("{flag} {} can be read by every user of this machine: chmod 600 it", path.display());
    }
}

#[cfg(not(unix))]
fn warn_if_readable_by_others(_: &str, _: &Path) {}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::header;
    use pegainfer_testing::TempDir;

    fn sent(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::AUTHORIZATION, value.parse().unwrap())])
    }

    fn rates(keys: &ApiKeys, key: &str) -> Rates {
        keys.find(Some(key)).unwrap().meter.map_or(Rates::default(), |meter| meter.rates())
    }

    #[test]
    fn only_a_whole_key_lets_in() {
        let both = ApiKeys::load(&["alpha", "beta"].map(|key| Secret(key.into())), None).unwrap();
        let lets_in = |headers: &HeaderMap| both.find(sent_key(headers)).is_some();
        for good in ["Bearer alpha", "bearer beta", "Bearer  beta"] {
            assert!(lets_in(&sent(good)), "{good}");
        }
        for bad in ["", "Bearer", "Bearer ", "alpha", "Basic alpha", "Bearer alph", "Bearer alphabeta", "Bearer Alpha"]
        {
            assert!(!lets_in(&sent(bad)), "{bad}");
        }
        assert!(!lets_in(&HeaderMap::new()));
    }

    #[test]
    fn a_file_has_one_key_on_each_line() {
        let dir = TempDir::new("keys");
        let path = dir.path().join("keys");
        std::fs::write(&path, "one\r\n\n two \n").unwrap();
        let loaded = ApiKeys::load(&[Secret("three".into())], Some(&path)).unwrap();
        let texts: Vec<String> = loaded.keys().iter().map(|key| key.text.clone()).collect();
        assert_eq!(texts, ["three", "one", "two"]);
        assert_eq!(format!("{loaded:?}"), "ApiKeys(3)");
        std::fs::write(&path, "four").unwrap();
        loaded.reload().unwrap();
        assert!(loaded.keys().len() == 2 && loaded.clone().find(Some("four")).is_some());
        std::fs::write(&path, "\n").unwrap();
        assert!(loaded.reload().is_err() && loaded.find(Some("four")).is_some(), "an error changes nothing");
        assert!(ApiKeys::load(&[], Some(&path)).unwrap_err().to_string().contains("has no key"));
        let error = ApiKeys::load(&[Secret("a b".into())], None).unwrap_err().to_string();
        assert!(!error.contains("a b"), "{error}");
        assert!(ApiKeys::load(&[Secret(String::new())], None).is_err());
    }

    /// Replaces the file by a pipe without a writer, which a plain read would wait for.
    #[cfg(unix)]
    #[test]
    fn a_file_that_becomes_a_pipe_leaves_the_keys() {
        let dir = TempDir::new("key-pipe");
        let path = dir.path().join("keys");
        std::fs::write(&path, "one").unwrap();
        let loaded = ApiKeys::load(&[], Some(&path)).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let error = format!("{:#}", loaded.reload().unwrap_err());
        assert!(error.starts_with("--api-key-file") && error.contains("it is not a regular file"), "{error}");
        assert!(loaded.find(Some("one")).is_some());
        assert!(format!("{:#}", ApiKeys::load(&[], Some(&path)).unwrap_err()).contains("it is not a regular file"));
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "two").unwrap();
        loaded.reload().unwrap();
        assert!(loaded.find(Some("two")).is_some(), "a later reload works");
    }

    #[test]
    fn a_line_may_have_rates_which_a_reload_keeps_counting() {
        let dir = TempDir::new("key-rates");
        let path = dir.path().join("keys");
        std::fs::write(&path, "one rpm=60 tpm=100_000\ntwo\tTPM=5\n").unwrap();
        let error = format!("{:#}", ApiKeys::load(&[], Some(&path)).unwrap_err());
        assert!(error.contains("line 2 of --api-key-file") && error.contains("rpm=N"), "{error}");
        assert!(!error.contains("TPM"), "it may be a part of a key: {error}");
        for bad in ["rpm=0", "rpm=-1", "tpm=x", "tpm", "rpm=1 rpm=2", "rpm=5000000000"] {
            std::fs::write(&path, format!("one {bad}\n")).unwrap();
            assert!(ApiKeys::load(&[], Some(&path)).is_err(), "{bad}");
        }
        std::fs::write(&path, "one rpm=1 tpm=100_000\ntwo rpm=1").unwrap();
        let loaded = ApiKeys::load(&["one", "three"].map(|key| Secret(key.into())), Some(&path)).unwrap();
        let number = |rate: Option<std::num::NonZeroU32>| rate.map(u32::from);
        let one = rates(&loaded, "one");
        assert_eq!((number(one.requests), number(one.tokens)), (Some(1), Some(100_000)));
        assert_eq!(rates(&loaded, "three"), Rates::default());
        let take = |key: &str| loaded.find(Some(key)).unwrap().meter.unwrap().request().is_ok();
        assert_eq!((take("one"), take("one"), take("two")), (true, false, true));
        std::fs::write(&path, "one rpm=1 tpm=100000\ntwo rpm=2").unwrap();
        loaded.reload().unwrap();
        assert_eq!((take("one"), take("two")), (false, true), "only new rates begin anew");
    }

    #[test]
    fn keys_do_not_show_in_the_flags() {
        let key = Secret::from("sk-1".to_string());
        assert!(!format!("{key:?}").contains("sk-1"));
    }
}
