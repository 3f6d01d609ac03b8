// The colour scheme that the user chose: `light`, `dark`, or `auto` for the system's. It is a classic script in the head, so
// that it runs before the first paint: a module would run after it, and the wrong colours would flash.
{
  const STORE = 'pegainfer.theme';

  const apply = (theme) => {
    document.documentElement.dataset.theme = theme;
  };

  const recall = () => {
    try {
      return localStorage.getItem(STORE) ?? 'auto';
    } catch {
      // Storage is forbidden.
      return 'auto';
    }
  };

  apply(recall());
  document.addEventListener('DOMContentLoaded', () => {
    const choice = document.getElementById('theme');
    choice.value = recall();
    choice.addEventListener('change', () => {
      apply(choice.value);
      try {
        localStorage.setItem(STORE, choice.value);
      } catch {
        // Storage is forbidden: the choice holds until the web UI is closed.
      }
    });
  });
}
