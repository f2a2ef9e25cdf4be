//! Reads little-endian fields from bytes that nobody has checked: every step is bounded, nothing is allocated.

/// The bytes ended before the field did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ended;

#[derive(Clone, Copy)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub fn new(bytes: &'a [u8]) -> Cursor<'a> {
        Cursor { bytes, at: 0 }
    }

    pub fn position(&self) -> usize {
        self.at
    }

    pub fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    pub fn take(&mut self, len: u64) -> Result<&'a [u8], Ended> {
        let end = usize::try_from(len).ok().and_then(|len| self.at.checked_add(len)).ok_or(Ended)?;
        let taken = self.bytes.get(self.at..end).ok_or(Ended)?;
        self.at = end;
        Ok(taken)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Ended> {
        let (head, _) = self.bytes[self.at..].split_first_chunk::<N>().ok_or(Ended)?;
        self.at += N;
        Ok(*head)
    }

    pub fn u32(&mut self) -> Result<u32, Ended> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub fn u64(&mut self) -> Result<u64, Ended> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A length-prefixed byte string.
    pub fn string(&mut self) -> Result<&'a [u8], Ended> {
        let len = self.u64()?;
        self.take(len)
    }
}
