// Symbols of LaTeX, as tables of command names and characters.

const table = (text) => new Map(text.trim().split(/\s+/).map((entry) => entry.split('=')));

/** Letters and other identifiers; capital Greek letters are upright. */
export const LETTERS = table(`
  alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ iota=ι kappa=κ varkappa=ϰ
  lambda=λ mu=μ nu=ν xi=ξ omicron=ο pi=π varpi=ϖ rho=ρ varrho=ϱ sigma=σ varsigma=ς tau=τ upsilon=υ phi=ϕ varphi=φ
  chi=χ psi=ψ omega=ω Gamma=Γ Delta=Δ Theta=Θ Lambda=Λ Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ Phi=Φ Psi=Ψ Omega=Ω
  ell=ℓ hbar=ℏ hslash=ℏ imath=ı jmath=ȷ Re=ℜ Im=ℑ wp=℘ aleph=ℵ beth=ℶ infty=∞ partial=∂ nabla=∇ emptyset=∅
  varnothing=∅ angle=∠ triangle=△ square=□ Box=□ blacksquare=■ forall=∀ exists=∃ nexists=∄ top=⊤ bot=⊥ degree=°
  dagger=† ddagger=‡ checkmark=✓ prime=′ ldots=… dots=… dotsc=… dotso=… cdots=⋯ dotsb=⋯ dotsm=⋯ vdots=⋮ ddots=⋱
  clubsuit=♣ diamondsuit=♢ heartsuit=♡ spadesuit=♠ flat=♭ natural=♮ sharp=♯ euro=€ pounds=£ S=§ P=¶ copyright=©
`);

/** Binary operators, relations and arrows. */
export const OPERATORS = table(`
  pm=± mp=∓ times=× div=÷ cdot=⋅ ast=∗ star=⋆ circ=∘ bullet=∙ oplus=⊕ ominus=⊖ otimes=⊗ oslash=⊘ odot=⊙
  cap=∩ cup=∪ uplus=⊎ sqcap=⊓ sqcup=⊔ vee=∨ lor=∨ wedge=∧ land=∧ setminus=∖ smallsetminus=∖ wr=≀ amalg=⨿ diamond=⋄
  leq=≤ le=≤ leqslant=⩽ geq=≥ ge=≥ geqslant=⩾ neq=≠ ne=≠ equiv=≡ approx=≈ cong=≅ sim=∼ simeq=≃ asymp=≍ doteq=≐
  propto=∝ ll=≪ gg=≫ lll=⋘ ggg=⋙ prec=≺ succ=≻ preceq=⪯ succeq=⪰ subset=⊂ supset=⊃ subseteq=⊆ supseteq=⊇
  subsetneq=⊊ supsetneq=⊋ nsubseteq=⊈ sqsubseteq=⊑ sqsupseteq=⊒ in=∈ notin=∉ ni=∋ mid=∣ nmid=∤ parallel=∥ nparallel=∦
  perp=⊥ vdash=⊢ dashv=⊣ models=⊨ vDash=⊨ bowtie=⋈ neg=¬ lnot=¬ coloneqq=≔ eqqcolon=≕ triangleq=≜ lesssim=≲ gtrsim=≳
  to=→ rightarrow=→ gets=← leftarrow=← leftrightarrow=↔ Rightarrow=⇒ implies=⟹ Leftarrow=⇐ impliedby=⟸
  Leftrightarrow=⇔ iff=⟺ longrightarrow=⟶ longleftarrow=⟵ longleftrightarrow=⟷ Longrightarrow=⟹ Longleftarrow=⟸
  Longleftrightarrow=⟺ mapsto=↦ longmapsto=⟼ hookrightarrow=↪ hookleftarrow=↩ rightharpoonup=⇀ rightharpoondown=⇁
  leftharpoonup=↼ leftharpoondown=↽ rightleftharpoons=⇌ uparrow=↑ downarrow=↓ updownarrow=↕ Uparrow=⇑ Downarrow=⇓
  nearrow=↗ searrow=↘ swarrow=↙ nwarrow=↖ leadsto=⇝ rightsquigarrow=⇝ therefore=∴ because=∵ colon=: And=&
  lhd=⊲ rhd=⊳ unlhd=⊴ unrhd=⊵ ltimes=⋉ rtimes=⋊ nrightarrow=↛ nleftarrow=↚
`);

/** Large operators. The limits of integrals stand next to them, those of the others above and below. */
export const LARGE = table(`
  sum=∑ prod=∏ coprod=∐ bigcup=⋃ bigcap=⋂ bigvee=⋁ bigwedge=⋀ bigoplus=⨁ bigotimes=⨂ bigodot=⨀ biguplus=⨄ bigsqcup=⨆
  int=∫ iint=∬ iiint=∭ oint=∮ oiint=∯ intop=∫
`);
export const INTEGRALS = new Set('∫∬∭∮∯');

/** Named functions with their limits next to them, and below them. */
export const FUNCTIONS = new Set(
  `arccos arcsin arctan arg cos cosh cot coth csc deg dim exp hom ker lg ln log sec sin sinh tan tanh sgn`.split(' '),
);
export const LIMITS = new Map([
  ...'det gcd inf lim max min sup Pr argmax argmin'.split(' ').map((name) => [name, name]),
  ['limsup', 'lim sup'],
  ['liminf', 'lim inf'],
]);

/** Fences by their command. */
export const FENCES = table(`
  langle=⟨ rangle=⟩ lfloor=⌊ rfloor=⌋ lceil=⌈ rceil=⌉ lvert=| rvert=| vert=| lVert=‖ rVert=‖ Vert=‖ lbrace={ rbrace=}
  lbrack=[ rbrack=] lgroup=⟮ rgroup=⟯ llbracket=⟦ rrbracket=⟧ ulcorner=⌜ urcorner=⌝ backslash=\\
`);

/** Accents: the character, and whether it stretches. */
export const ACCENTS = new Map(
  Object.entries({
    hat: 'ˆ', check: 'ˇ', tilde: '~', acute: '´', grave: '`', dot: '˙', ddot: '¨', dddot: '⃛', breve: '˘', bar: '¯',
    vec: '→', mathring: '˚', widehat: '^', widetilde: '~', overrightarrow: '→', overleftarrow: '←',
    overleftrightarrow: '↔', overbrace: '⏞', overbracket: '⎴',
  }),
);
export const UNDER = new Map(Object.entries({ underbrace: '⏟', underbracket: '⎵', underrightarrow: '→' }));
export const STRETCHY = /^(wide|over|under)/;

/** Arrows with text above and below them. */
export const ARROWS = table(`
  xrightarrow=→ xleftarrow=← xleftrightarrow=↔ xRightarrow=⇒ xLeftarrow=⇐ xLeftrightarrow=⇔ xmapsto=↦ xrightleftharpoons=⇌
`);

/** Widths of spaces, in em. */
export const SPACES = new Map(
  Object.entries({
    ',': 0.167, thinspace: 0.167, ':': 0.222, '>': 0.222, ';': 0.278, '!': -0.167, ' ': 0.25, enspace: 0.5, quad: 1, qquad: 2,
    nobreakspace: 0.25, space: 0.25,
  }),
);

/** First code points of the styled letters: A, a, 0; null where Unicode has none. */
const STYLES = {
  bold: [0x1d400, 0x1d41a, 0x1d7ce],
  'bold-italic': [0x1d468, 0x1d482, 0x1d7ce],
  script: [0x1d49c, 0x1d4b6, null],
  fraktur: [0x1d504, 0x1d51e, null],
  'double-struck': [0x1d538, 0x1d552, 0x1d7d8],
  'sans-serif': [0x1d5a0, 0x1d5ba, 0x1d7e2],
  monospace: [0x1d670, 0x1d68a, 0x1d7f6],
};
/** Letters that Unicode has had before it had the rows of styled letters. */
const OLDER = {
  'double-struck': { C: 'ℂ', H: 'ℍ', N: 'ℕ', P: 'ℙ', Q: 'ℚ', R: 'ℝ', Z: 'ℤ' },
  script: { B: 'ℬ', E: 'ℰ', F: 'ℱ', H: 'ℋ', I: 'ℐ', L: 'ℒ', M: 'ℳ', R: 'ℛ', e: 'ℯ', g: 'ℊ', o: 'ℴ' },
  fraktur: { C: 'ℭ', H: 'ℌ', I: 'ℑ', R: 'ℜ', Z: 'ℨ' },
};

/** `text` in the style; characters without a form in it stay as they are. */
export function styled(text, style) {
  return [...text].map((char) => OLDER[style]?.[char] ?? shifted(char, STYLES[style])).join('');
}

function shifted(char, starts) {
  const row = ['A', 'a', '0'].findIndex((first, at) => char >= first && char <= ['Z', 'z', '9'][at]);
  if (row < 0 || !starts?.[row]) return char;
  return String.fromCodePoint(starts[row] + char.codePointAt(0) - ['A', 'a', '0'][row].codePointAt(0));
}

/** Styles by the commands that set them; `normal` is upright. */
export const FONTS = new Map(
  Object.entries({
    mathrm: 'normal', mathup: 'normal', rm: 'normal', mathbf: 'bold', bf: 'bold', boldsymbol: 'bold-italic', bm: 'bold-italic',
    mathit: 'italic', it: 'italic', mathnormal: 'italic', mathbb: 'double-struck', Bbb: 'double-struck', mathcal: 'script',
    cal: 'script', mathscr: 'script', mathfrak: 'fraktur', frak: 'fraktur', mathsf: 'sans-serif', mathtt: 'monospace',
  }),
);

/** Classes of text by the commands that set it. */
export const TEXTS = new Map(
  Object.entries({
    text: '', textrm: '', textnormal: '', mbox: '', hbox: '', textup: '', textbf: 'strong', textit: 'slanted',
    emph: 'slanted', texttt: 'typed', textsf: '',
  }),
);

/** Environments with rows and columns: fences, and the alignment of the columns in turn. */
export const ENVIRONMENTS = new Map(
  Object.entries({
    matrix: {}, smallmatrix: {}, pmatrix: { open: '(', close: ')' }, bmatrix: { open: '[', close: ']' },
    Bmatrix: { open: '{', close: '}' }, vmatrix: { open: '|', close: '|' }, Vmatrix: { open: '‖', close: '‖' },
    cases: { open: '{', close: '', align: ['left'] }, dcases: { open: '{', close: '', align: ['left'] },
    rcases: { open: '', close: '}', align: ['left'] }, array: {}, subarray: {},
    gather: {}, gathered: {}, equation: {}, multline: {}, displaymath: {}, math: {},
    align: { align: ['right', 'left'] }, aligned: { align: ['right', 'left'] }, alignat: { align: ['right', 'left'] },
    alignedat: { align: ['right', 'left'] }, split: { align: ['right', 'left'] }, flalign: { align: ['right', 'left'] },
    eqnarray: { align: ['right', 'center', 'left'] },
  }),
);
