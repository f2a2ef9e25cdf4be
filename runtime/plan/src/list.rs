//! Lists of bounded length.
//!
//! A byte of a hostile file can become tens of bytes in memory, and a vector that grows as elements come holds three
//! times its size while it moves. So a list is given exactly the room it says it needs, and one that says more than any
//! plan needs is refused before it is given any.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};

/// Decodes a list of at most `MOST` elements; for `#[serde(deserialize_with)]`.
pub(crate) fn at_most<'de, const MOST: usize, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    deserializer.deserialize_seq(Bounded::<MOST, T>(PhantomData))
}

struct Bounded<const MOST: usize, T>(PhantomData<T>);

impl<'de, const MOST: usize, T: Deserialize<'de>> Visitor<'de> for Bounded<MOST, T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {MOST}")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
        // The decoder gives no hint where a list claims more elements than there are bytes.
        let len = list.size_hint().filter(|len| *len <= MOST).ok_or_else(|| A::Error::custom("a list is too long"))?;
        let mut out = Vec::with_capacity(len);
        while let Some(element) = list.next_element()? {
            out.push(element);
        }
        Ok(out)
    }
}
