//! Exactness: a turn without the prefix cache must get the same answer.

use super::session::{Conversation, Run};
use serde::Serialize;
use std::fmt;
use std::num::NonZeroUsize;

/// Length of the shown texts in characters.
const SHOWN: usize = 40;

/// Answers with the prefix cache, compared with those without it.
#[derive(Debug, Default, Clone, Serialize)]
pub struct Comparison {
    /// Number of answers that were compared.
    pub compared: usize,
    /// Number of equal ones among them.
    pub equal: usize,
    /// Number of turns that could not be sent again, or found a cached prefix.
    pub not_compared: usize,
    /// True if the server takes the field `cache_salt`, which keeps a prompt out of the prefix cache.
    pub takes_salt: bool,
    /// The first difference.
    pub first_difference: Option<Difference>,
}

/// Where two answers differ.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Difference {
    /// Number of the session.
    pub session: usize,
    /// Number of the turn, from 0 on.
    pub turn: usize,
    /// Number of equal characters before the difference.
    pub position: usize,
    /// How the answer with the prefix cache goes on.
    pub with_cache: String,
    /// How the answer without it goes on.
    pub without_cache: String,
}

impl Comparison {
    /// Sends turns of the sessions again, one at a time: the last one of each session, and every `every`-th one.
    pub async fn new(run: &Run, sessions: &[Conversation], every: Option<NonZeroUsize>) -> Self {
        let mut comparison = Self::default();
        let mut replays = 0;
        for session in sessions.iter().filter(|session| session.agent.subagent.is_none()) {
            for turn in chosen(session.answers.len(), every) {
                let (answer, length) = &session.answers[turn];
                let reply = run.replay(&session.messages[..*length], replays).await;
                replays += 1;
                match reply {
                    Ok(reply) if reply.cached.unwrap_or(0) == 0 && run.api.takes("cache_salt") => {
                        comparison.add((session.agent.session, turn), answer, &reply.text.all());
                    }
                    Ok(_) => comparison.not_compared += 1,
                    Err(error) => {
                        log::warn!("turn {} of session {} again: {error:#}", turn + 1, session.agent.session + 1);
                        comparison.not_compared += 1;
                    }
                }
            }
        }
        comparison.takes_salt = run.api.takes("cache_salt");
        comparison
    }

    /// True if all answers were compared and are equal.
    pub fn is_exact(&self) -> bool {
        self.compared > 0 && self.equal == self.compared && self.not_compared == 0
    }

    fn add(&mut self, (session, turn): (usize, usize), with_cache: &str, without_cache: &str) {
        self.compared += 1;
        let Some((position, with_cache, without_cache)) = difference(with_cache, without_cache) else {
            self.equal += 1;
            return;
        };
        let difference = Difference { session, turn, position, with_cache, without_cache };
        self.first_difference.get_or_insert(difference);
    }
}

/// The turns of `count` that are sent again.
fn chosen(count: usize, every: Option<NonZeroUsize>) -> impl Iterator<Item = usize> {
    let is_chosen = move |turn: &usize| turn + 1 == count || every.is_some_and(|every| (turn + 1) % every == 0);
    (0..count).filter(is_chosen)
}

/// Number of equal characters at the beginning, and the start of both rests; `None` for equal texts.
fn difference(a: &str, b: &str) -> Option<(usize, String, String)> {
    if a == b {
        return None;
    }
    let position = a.chars().zip(b.chars()).take_while(|(a, b)| a == b).count();
    let rest = |text: &str| text.chars().skip(position).take(SHOWN).collect();
    Some((position, rest(a), rest(b)))
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { compared, equal, not_compared, takes_salt, first_difference } = self;
        writeln!(f, "Exactness: {equal} of {compared} answers are the same without the prefix cache.")?;
        if let Some(Difference { session, turn, position, with_cache, without_cache }) = first_difference {
            let (session, turn) = (session + 1, turn + 1);
            writeln!(f, "First difference: session {session}, turn {turn}, after {position} characters")?;
            writeln!(f, "  with the cache:    {with_cache:?}\n  without the cache: {without_cache:?}")?;
        }
        match (not_compared, takes_salt) {
            (0, _) => Ok(()),
            (n, true) => writeln!(f, "{n} could not be compared: the request failed, or found a cached prefix."),
            (n, false) => writeln!(f, "{n} could not be compared: the server refuses the field cache_salt."),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_shown_with_both_continuations() {
        let mut comparison = Comparison::default();
        comparison.add((0, 3), "same", "same");
        assert!(comparison.is_exact());
        comparison.add((1, 4), "grün und rot", "grün und blau");
        comparison.add((2, 4), "x", "y");
        assert_eq!((comparison.compared, comparison.equal, comparison.is_exact()), (3, 1, false));
        let expected =
            Difference { session: 1, turn: 4, position: 9, with_cache: "rot".into(), without_cache: "blau".into() };
        assert_eq!(comparison.first_difference, Some(expected));
        let shown = "Exactness: 1 of 3 answers are the same without the prefix cache.\n\
            First difference: session 2, turn 5, after 9 characters\n  \
            with the cache:    \"rot\"\n  without the cache: \"blau\"\n";
        assert_eq!(comparison.to_string(), shown);
        assert_eq!(difference("ab", "abc"), Some((2, String::new(), "c".into())), "one text ends");
    }

    #[test]
    fn nothing_compared_is_not_exact() {
        assert!(!Comparison::default().is_exact());
        assert!(!Comparison { compared: 2, equal: 2, not_compared: 1, ..Comparison::default() }.is_exact());
    }

    #[test]
    fn the_last_turn_is_always_sent_again() {
        let of = |count, every| chosen(count, NonZeroUsize::new(every)).collect::<Vec<_>>();
        assert_eq!((of(7, 0), of(7, 3), of(6, 3)), (vec![6], vec![2, 5, 6], vec![2, 5]));
        assert_eq!(of(0, 1), [0; 0]);
    }
}
