//! Values that start on a cache line, so that no vector load straddles two.

const LINE: usize = 64 / size_of::<f32>();

/// A buffer whose values start on a cache line.
#[derive(Debug, Default)]
pub struct Aligned {
    /// Some more than asked for: the first few are skipped.
    values: Vec<f32>,
    skipped: usize,
    len: usize,
}

impl Aligned {
    /// `len` zeros, which the system provides page by page as they are first touched.
    pub fn zeros(len: usize) -> Aligned {
        let values = vec![0.0; len + LINE - 1];
        let skipped = values.as_ptr().align_offset(64).min(LINE - 1);
        Aligned { values, skipped, len }
    }

    pub fn as_slice(&self) -> &[f32] {
        &self.values[self.skipped..self.skipped + self.len]
    }

    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        &mut self.values[self.skipped..self.skipped + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_on_a_line_and_has_the_length_asked_for() {
        for len in [0, 1, 15, 16, 1000] {
            let mut values = Aligned::zeros(len);
            assert_eq!(values.as_slice(), vec![0.0; len]);
            assert_eq!(values.as_mut_slice().as_ptr().align_offset(64), 0);
        }
        assert!(Aligned::default().as_slice().is_empty());
    }
}
