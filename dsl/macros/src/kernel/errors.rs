//! Refusals: collected while the whole function is read, shown all at once, each at its token.

use proc_macro2::TokenStream;
use quote::ToTokens;
use std::cell::RefCell;

/// The refusals met so far. Shared by the reader and the printer, hence the interior mutability.
#[derive(Default)]
pub struct Errors(RefCell<Vec<syn::Error>>);

impl Errors {
    /// Refuses the syntax `node`. `message` names the rule and says what to write instead.
    pub fn refuse(&self, node: &impl ToTokens, message: impl std::fmt::Display) {
        self.push(syn::Error::new_spanned(node, message));
    }

    pub fn push(&self, error: syn::Error) {
        self.0.borrow_mut().push(error);
    }

    pub fn any(&self) -> bool {
        !self.0.borrow().is_empty()
    }

    /// `compile_error!` items for every refusal; `None` when there was none.
    pub fn into_compile_errors(self) -> Option<TokenStream> {
        let errors = self.0.into_inner();
        (!errors.is_empty()).then(|| errors.iter().map(syn::Error::to_compile_error).collect())
    }

    /// The messages alone, for unit tests on token streams.
    #[cfg(test)]
    pub fn messages(&self) -> Vec<String> {
        self.0.borrow().iter().map(ToString::to_string).collect()
    }
}
